//! The attribute `#[fencelock::locked]` of [fencelock](https://docs.rs/fencelock), which documents it. Use it through the feature
//! `macros` of that crate: what it writes refers to `::fencelock`.

mod attribute;
mod body;

use proc_macro::TokenStream;
use syn::{Error, Item, ItemFn};

/// Runs an async function under a lock. Documented at [`fencelock::locked`](https://docs.rs/fencelock/latest/fencelock/attr.locked.html).
#[proc_macro_attribute]
pub fn locked(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let item = proc_macro2::TokenStream::from(item);
    syn::parse::<attribute::Attribute>(arguments)
        .and_then(|attribute| body::expand(&attribute, function(item.clone())?))
        .unwrap_or_else(|error| {
            // The item stays, so that the only error is the one at the argument.
            let error = error.into_compile_error();
            quote::quote!(#error #item)
        })
        .into()
}

fn function(item: proc_macro2::TokenStream) -> syn::Result<ItemFn> {
    syn::parse2(item.clone()).map_err(|error| match syn::parse2(item) {
        Ok(Item::Impl(block)) => {
            let message = "#[locked] takes a function; put it on each method of this block that is to run under a lock";
            Error::new_spanned(block.impl_token, message)
        }
        _ => error,
    })
}
