//! The arguments of the attribute.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote};
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, ExprLit, Ident, Lit, Token};

const OPTIONS: [&str; 8] = [
    "ttl", "wait_for", "max_hold", "at_least", "busy", "guard", "label", "locks",
];

/// `"order/{id}", wait_for = "2s", ...`.
pub(crate) struct Attribute {
    name: TokenStream,
    /// Calls that set the options of the request.
    settings: TokenStream,
    /// Whether a busy lock is no error.
    pub(crate) skips: bool,
    /// What the body calls its guard.
    pub(crate) guard: Ident,
    pub(crate) locks: Option<Expr>,
}

impl Parse for Attribute {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.is_empty() || (input.peek(Ident) && input.peek2(Token![=]) && !input.peek2(Token![==])) {
            let message = "name the lock first, as in #[locked(\"order/{id}\")]";
            return Err(Error::new(input.span(), message));
        }
        let mut attribute = Self {
            name: name(input.parse()?)?,
            settings: quote!(.no_wait()),
            skips: false,
            guard: Ident::new("guard", Span::mixed_site()),
            locks: None,
        };
        let mut given: Vec<String> = Vec::new();
        while !input.is_empty() {
            input.parse::<Token![,]>()?;
            if input.is_empty() {
                break;
            }
            let option: Ident = input.parse()?;
            let word = option.to_string();
            if given.contains(&word) {
                return Err(Error::new(option.span(), format!("{word} is given twice")));
            }
            if !OPTIONS.contains(&&*word) {
                let message = format!("unknown option {word}; known are {}", OPTIONS.join(", "));
                return Err(Error::new(option.span(), message));
            }
            input.parse::<Token![=]>()?;
            match &*word {
                "busy" => attribute.skips = is_skip(&input.parse()?)?,
                "guard" => attribute.guard = input.parse()?,
                "locks" => attribute.locks = Some(input.parse()?),
                _ => attribute.settings.extend(setting(&option, input.parse()?)?),
            }
            given.push(word);
        }
        Ok(attribute)
    }
}

impl Attribute {
    /// The request, from the client `locks`.
    pub(crate) fn request(&self, locks: &TokenStream) -> TokenStream {
        let (name, settings) = (&self.name, &self.settings);
        quote!(::fencelock::Locks::lock(&(#locks), #name) #settings)
    }
}

/// The name of the lock, as an expression of the type `String`.
fn name(value: Expr) -> syn::Result<TokenStream> {
    let Expr::Lit(ExprLit { lit, .. }) = &value else {
        return Ok(quote!(::std::string::ToString::to_string(&(#value))));
    };
    let wrong = |message: &str| Err(Error::new_spanned(lit, message));
    let Lit::Str(text) = lit else {
        return wrong("the name of a lock is a text such as \"order/{id}\", or an expression that displays");
    };
    let text = text.value();
    if text.is_empty() {
        return wrong("the name of a lock is empty; give at least one character");
    }
    if text.chars().any(char::is_control) {
        return wrong("the name of a lock holds a control character; remove it");
    }
    // `format!` says what else is wrong.
    for braced in text.replace("{{", "").split('{').skip(1) {
        let value = braced.split(['}', ':']).next().unwrap_or_default();
        if value.is_empty() || value.contains(|c: char| !c.is_alphanumeric() && c != '_') {
            return wrong(&format!(
                "{{{value}}}: the braces of a text take a variable, as in {{id}} or {{id:08}}; for other values the name is an \
                 expression, as in #[locked(format!(\"order/{{}}\", order.id))]"
            ));
        }
    }
    Ok(quote!(::std::format!(#lit)))
}

/// The call that sets an option of the request.
fn setting(option: &Ident, value: Expr) -> syn::Result<TokenStream> {
    if option == "wait_for" && is_word(&value, "forever") {
        return Ok(quote!(.wait_forever()));
    }
    let value = match option == "label" {
        true => value.into_token_stream(),
        false => duration(value, option)?,
    };
    Ok(quote!(.#option(#value)))
}

/// A text such as "1m 30s", read now, or an expression of the type `Duration`.
fn duration(value: Expr, option: &Ident) -> syn::Result<TokenStream> {
    let Expr::Lit(ExprLit { lit, .. }) = &value else {
        return Ok(value.into_token_stream());
    };
    let time = match lit {
        Lit::Str(text) => humantime::parse_duration(&text.value()).ok(),
        _ => None,
    };
    let Some(time) = time else {
        let help = format!("{option} is a text such as \"30s\" or \"500ms\", or an expression of the type Duration");
        return Err(Error::new_spanned(lit, help));
    };
    if time.is_zero() && (option == "ttl" || option == "max_hold") {
        let message = format!("a lock with a {option} of zero is never held");
        return Err(Error::new_spanned(lit, message));
    }
    let (seconds, nanos) = (time.as_secs(), time.subsec_nanos());
    Ok(quote!(::core::time::Duration::new(#seconds, #nanos)))
}

fn is_skip(value: &Expr) -> syn::Result<bool> {
    if is_word(value, "skip") || is_word(value, "error") {
        return Ok(is_word(value, "skip"));
    }
    Err(Error::new_spanned(value, "busy is error or skip"))
}

fn is_word(value: &Expr, word: &str) -> bool {
    matches!(value, Expr::Path(path) if path.path.is_ident(word))
}
