//! The attribute `#[fencelock::locked]` of [fencelock](https://docs.rs/fencelock), which documents it. Use it through the feature
//! `macros` of that crate: what it writes refers to `::fencelock`.

mod attribute;
mod body;
mod name;

use proc_macro::TokenStream;

/// Runs an async function under a lock. Documented at [`fencelock::locked`](https://docs.rs/fencelock/latest/fencelock/attr.locked.html).
#[proc_macro_attribute]
pub fn locked(arguments: TokenStream, function: TokenStream) -> TokenStream {
    let function = proc_macro2::TokenStream::from(function);
    syn::parse::<attribute::Attribute>(arguments)
        .and_then(|attribute| body::expand(&attribute, syn::parse2(function.clone())?))
        .unwrap_or_else(|error| {
            // The function stays, so that the only error is the one at the argument.
            let error = error.into_compile_error();
            quote::quote!(#error #function)
        })
        .into()
}
