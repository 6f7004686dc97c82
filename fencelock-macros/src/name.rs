//! The name of the lock: a text with `{expression}` in it, or an expression that displays.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, ExprLit, Lit, LitStr};

const EXAMPLE: &str = "the name of a lock is a text such as \"order/{id}\", or an expression that displays";

/// A lock's name, as an expression of the type `String`.
pub(crate) enum Name {
    /// As `format!` takes them, with `{}` for each value.
    Text {
        format: LitStr,
        values: Vec<Expr>,
    },
    Value(Expr),
}

impl Parse for Name {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        match input.parse()? {
            Expr::Lit(ExprLit {
                lit: Lit::Str(text), ..
            }) => text_with_values(&text),
            Expr::Lit(other) => Err(Error::new_spanned(other, EXAMPLE)),
            value => Ok(Self::Value(value)),
        }
    }
}

impl ToTokens for Name {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        tokens.extend(match self {
            Self::Text { format, values } => quote!(::std::format!(#format #(, #values)*)),
            Self::Value(value) => quote!(::std::string::ToString::to_string(&(#value))),
        });
    }
}

/// Takes the expressions out of the braces. `{{` and `}}` are braces of the name itself.
fn text_with_values(text: &LitStr) -> syn::Result<Name> {
    let wrong = |message: &str| Err(Error::new(text.span(), message));
    let whole = text.value();
    if whole.is_empty() {
        return wrong("the name of a lock is empty; give at least one character");
    }
    if whole.chars().any(char::is_control) {
        return wrong("the name of a lock holds a control character; remove it");
    }
    let (mut format, mut values) = (String::new(), Vec::new());
    let mut rest = whole.as_str();
    while let Some(at) = rest.find(['{', '}']) {
        let (before, brace) = rest.split_at(at);
        format.push_str(before);
        if brace.starts_with("{{") || brace.starts_with("}}") {
            format.push_str(&brace[..2]);
            rest = &brace[2..];
            continue;
        }
        let Some((inner, after)) = brace.strip_prefix('{').and_then(|inner| inner.split_once('}')) else {
            return wrong("a brace without its other half; a brace of the name itself is written twice");
        };
        let (value, specification) = inner.split_at(end_of_value(inner));
        if value.trim().is_empty() {
            return wrong("a name holds its values in the braces, as in {order.id}");
        }
        let value = LitStr::new(value, text.span());
        values.push(value.parse().map_err(|error| {
            Error::new(
                text.span(),
                format!("{{{}}} is not an expression: {error}", value.value()),
            )
        })?);
        format.push('{');
        format.push_str(specification);
        format.push('}');
        rest = after;
    }
    format.push_str(rest);
    let format = LitStr::new(&format, text.span());
    Ok(Name::Text { format, values })
}

/// Where the expression ends: at the colon before a format specification, or at the end. A path has two colons.
fn end_of_value(inner: &str) -> usize {
    let bytes = inner.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (b':', Some(b':')) => at += 2,
            (b':', _) => return at,
            _ => at += 1,
        }
    }
    at
}
