//! The function, with its body under the lock.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{
    AssocType, Error, Expr, ExprAsync, Ident, ItemFn, PatIdent, Receiver, ReturnType, Signature, Stmt, Type,
    TypeImplTrait, parse_quote,
};

use crate::attribute::Attribute;

pub(crate) fn expand(attribute: &Attribute, mut function: ItemFn) -> syn::Result<TokenStream> {
    let output = output(&function.sig)?;
    let (request, wanted) = (hidden("request"), attribute.request(&client(attribute, &function.sig)?));
    if function.sig.asyncness.is_some() {
        let locked = under_lock(attribute, &output, &function.block);
        function.block = parse_quote!({
            let #request = #wanted;
            #locked
        });
    } else {
        // Before the block, where `self` and the arguments still have their names.
        let statements = &mut function.block.stmts;
        let Some(block) = statements.last_mut().and_then(block_in) else {
            return Err(not_async(&function.sig));
        };
        let locked = under_lock(attribute, &output, &block.block);
        block.block = parse_quote!({ #locked });
        block.capture = Some(parse_quote!(move));
        statements.insert(0, parse_quote!(let #request = #wanted;));
    }
    Ok(quote!(#function))
}

/// Runs `body` under the lock of the request.
fn under_lock(attribute: &Attribute, output: &Type, body: &impl ToTokens) -> TokenStream {
    let (guard, error) = (&attribute.guard, hidden("error"));
    let (request, ran) = (hidden("request"), hidden("ran"));
    // The compiler's errors point at the return type; lints know that the user did not write this.
    let span = output.span().resolved_at(Span::mixed_site());
    let failed = quote_spanned! {span=>
        ::core::result::Result::Err(::core::convert::From::from(#error))
    };
    let skipped = attribute.skips.then(|| {
        let skip = quote_spanned!(span=> ::fencelock::Skip::skipped());
        quote! {
            ::core::result::Result::Err(#error) if #error.is_busy() => {
                ::core::result::Result::Ok(#skip)
            }
        }
    });
    // A closure's return type alone gives its body no expected type, so that values would not be coerced to it.
    let value = hidden("value");
    quote! {
        let #ran = ::fencelock::LockRequest::with(
            #request,
            async move |#guard: &::fencelock::LockGuard| -> #output {
                if let ::core::option::Option::Some(#value) = ::core::option::Option::None::<#output> {
                    return #value;
                }
                #[allow(clippy::diverging_sub_expression)]
                let #value: #output = #body;
                #[allow(unreachable_code)]
                #value
            },
        );
        match #ran.await {
            ::core::result::Result::Ok(#ran) => #ran,
            #skipped
            ::core::result::Result::Err(#error) => #failed,
        }
    }
}

/// A name that the body of the function cannot see.
fn hidden(name: &str) -> Ident {
    Ident::new(name, Span::mixed_site())
}

/// What the function returns when it has run: of an async function its return type, of another one the output of the future that it returns.
fn output(signature: &Signature) -> syn::Result<Type> {
    let returned = match &signature.output {
        ReturnType::Type(_, returned) => Some(&**returned),
        ReturnType::Default => None,
    };
    let output = match signature.asyncness {
        Some(_) => returned,
        None => {
            let mut found = Found::default();
            found.visit_return_type(&signature.output);
            Some(found.output.ok_or_else(|| not_async(signature))?)
        }
    };
    let Some(output) = output.filter(|output| !matches!(output, Type::Tuple(tuple) if tuple.elems.is_empty())) else {
        let message = "the function must return a Result whose error is From<LockError>: the lock may be busy, or lost";
        return Err(Error::new_spanned(signature, message));
    };
    let mut found = Found::default();
    found.visit_type(output);
    if found.is_impl {
        let message = "the return type must be named: it cannot hold an impl Trait";
        return Err(Error::new_spanned(output, message));
    }
    Ok(output.clone())
}

fn not_async(signature: &Signature) -> Error {
    Error::new_spanned(
        signature.fn_token,
        "#[locked] takes an async function, or one that ends in an async block; above other attributes that change the function, such as \
         #[tokio::main]",
    )
}

/// The client: as given, an argument of the name `locks`, or the field of `self`.
fn client(attribute: &Attribute, signature: &Signature) -> syn::Result<TokenStream> {
    let mut found = Found::default();
    found.visit_signature(signature);
    match (&attribute.locks, found.locks) {
        (Some(locks), _) => Ok(quote!(#locks)),
        (None, Some(locks)) => Ok(quote!(#locks)),
        (None, None) if found.has_self => Ok(quote!(::fencelock::SelfWithoutLocksArgument(&self).locks)),
        (None, None) => Err(Error::new_spanned(
            &signature.ident,
            "no argument of the name locks; give the client, as in locks = state.locks",
        )),
    }
}

/// What a signature or a type holds.
#[derive(Default)]
struct Found<'ast> {
    has_self: bool,
    /// An argument of this name.
    locks: Option<&'ast Ident>,
    is_impl: bool,
    /// `T` of `Pin<Box<dyn Future<Output = T>>>` and of `impl Future<Output = T>`.
    output: Option<&'ast Type>,
}

impl<'ast> Visit<'ast> for Found<'ast> {
    fn visit_receiver(&mut self, _: &'ast Receiver) {
        self.has_self = true;
    }

    fn visit_pat_ident(&mut self, bound: &'ast PatIdent) {
        if bound.ident == "locks" {
            self.locks = Some(&bound.ident);
        }
        visit::visit_pat_ident(self, bound);
    }

    fn visit_type_impl_trait(&mut self, found: &'ast TypeImplTrait) {
        self.is_impl = true;
        visit::visit_type_impl_trait(self, found);
    }

    fn visit_assoc_type(&mut self, found: &'ast AssocType) {
        if found.ident == "Output" {
            self.output.get_or_insert(&found.ty);
        }
        visit::visit_assoc_type(self, found);
    }
}

/// The `async` block that the function ends in: `Box::pin(async move { .. })` or the block alone.
fn block_in(last: &mut Stmt) -> Option<&mut ExprAsync> {
    match last {
        Stmt::Expr(Expr::Async(block), None) => Some(block),
        Stmt::Expr(Expr::Call(call), None) => match call.args.first_mut() {
            Some(Expr::Async(block)) => Some(block),
            _ => None,
        },
        _ => None,
    }
}
