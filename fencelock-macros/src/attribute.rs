//! The arguments of the attribute.

use std::time::Duration;

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote};
use syn::parse::{Parse, ParseStream};
use syn::{Expr, ExprLit, Ident, Lit, LitStr, Token};

use crate::name::Name;

const OPTIONS: &str = "ttl, wait, at_least, busy, guard, label and locks";

/// `"order/{id}", wait = "2s", ...`.
pub(crate) struct Attribute {
    pub(crate) name: Name,
    pub(crate) ttl: Option<TokenStream>,
    pub(crate) wait: Wait,
    pub(crate) at_least: Option<TokenStream>,
    pub(crate) busy: Busy,
    pub(crate) guard: Option<Ident>,
    pub(crate) label: Option<Expr>,
    pub(crate) locks: Option<Expr>,
}

/// How long to wait for a lock that is held elsewhere.
pub(crate) enum Wait {
    No,
    For(TokenStream),
    Forever,
}

/// What a busy lock comes to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Busy {
    Error,
    Skip,
}

impl Parse for Attribute {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.is_empty() || (input.peek(Ident) && input.peek2(Token![=]) && !input.peek2(Token![==])) {
            let message = "name the lock first, as in #[locked(\"order/{id}\")]";
            return Err(syn::Error::new(input.span(), message));
        }
        let mut attribute = Self {
            name: Name::parse(input)?,
            ttl: None,
            wait: Wait::No,
            at_least: None,
            busy: Busy::Error,
            guard: None,
            label: None,
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
                return Err(syn::Error::new(option.span(), format!("{word} is given twice")));
            }
            if !matches!(
                &*word,
                "ttl" | "wait" | "at_least" | "busy" | "guard" | "label" | "locks"
            ) {
                let message = format!("unknown option {word}; known are {OPTIONS}");
                return Err(syn::Error::new(option.span(), message));
            }
            input.parse::<Token![=]>()?;
            match &*word {
                "ttl" => attribute.ttl = Some(duration(input.parse()?, "ttl")?),
                "wait" => attribute.wait = wait(input.parse()?)?,
                "at_least" => attribute.at_least = Some(duration(input.parse()?, "at_least")?),
                "busy" => attribute.busy = busy(&input.parse()?)?,
                "guard" => attribute.guard = Some(input.parse()?),
                "label" => attribute.label = Some(input.parse()?),
                _ => attribute.locks = Some(input.parse()?),
            }
            given.push(word);
        }
        Ok(attribute)
    }
}

fn wait(value: Expr) -> syn::Result<Wait> {
    match word(&value) {
        Some(word) if word == "forever" => Ok(Wait::Forever),
        _ => Ok(Wait::For(duration(value, "wait")?)),
    }
}

fn busy(value: &Expr) -> syn::Result<Busy> {
    match word(value) {
        Some(word) if word == "error" => Ok(Busy::Error),
        Some(word) if word == "skip" => Ok(Busy::Skip),
        _ => Err(syn::Error::new_spanned(value, "busy is error or skip")),
    }
}

/// A text such as "1m 30s", read now, or an expression of the type `Duration`.
fn duration(value: Expr, option: &str) -> syn::Result<TokenStream> {
    let Expr::Lit(ExprLit { lit, .. }) = &value else {
        return Ok(value.into_token_stream());
    };
    let help = format!("{option} is a text such as \"30s\" or \"500ms\", or an expression of the type Duration");
    let Lit::Str(text) = lit else {
        return Err(syn::Error::new_spanned(lit, help));
    };
    let parsed = time(text).ok_or_else(|| syn::Error::new(text.span(), help))?;
    if option == "ttl" && parsed.is_zero() {
        return Err(syn::Error::new(text.span(), "a lock with a ttl of zero is never held"));
    }
    let (seconds, nanos) = (parsed.as_secs(), parsed.subsec_nanos());
    Ok(quote!(::core::time::Duration::new(#seconds, #nanos)))
}

fn time(text: &LitStr) -> Option<Duration> {
    humantime::parse_duration(&text.value()).ok()
}

/// The value, if it is a single word.
fn word(value: &Expr) -> Option<&Ident> {
    match value {
        Expr::Path(path) => path.path.get_ident(),
        _ => None,
    }
}

impl Attribute {
    /// The request, from the client `locks`.
    pub(crate) fn request(&self, locks: &TokenStream) -> TokenStream {
        let name = &self.name;
        let ttl = self.ttl.as_ref().map(|ttl| quote!(.ttl(#ttl)));
        let wait = match &self.wait {
            Wait::No => quote!(.no_wait()),
            Wait::For(limit) => quote!(.wait_for(#limit)),
            Wait::Forever => quote!(.wait_forever()),
        };
        let at_least = self.at_least.as_ref().map(|length| quote!(.at_least(#length)));
        let label = self.label.as_ref().map(|label| quote!(.label(#label)));
        quote!(::fencelock::Locks::lock(&(#locks), #name) #ttl #wait #at_least #label)
    }

    /// What the body calls its guard.
    pub(crate) fn guard(&self) -> Ident {
        self.guard
            .clone()
            .unwrap_or_else(|| Ident::new("guard", Span::mixed_site()))
    }
}
