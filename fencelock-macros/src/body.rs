//! The function, with its body under the lock.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{
    Error, Expr, ExprAsync, FnArg, GenericArgument, Ident, ItemFn, Pat, PathArguments, ReturnType, Signature, Stmt,
    TraitBound, Type, TypeParamBound, parse_quote,
};

use crate::attribute::{Attribute, Busy};

/// Where a function runs asynchronously: its whole body, or the `async` block that it returns, as `async_trait` writes
/// methods.
enum Body {
    Whole(Type),
    Block(Type),
}

pub(crate) fn expand(attribute: &Attribute, mut function: ItemFn) -> syn::Result<TokenStream> {
    let body = Body::of(&function)?;
    let locks = client(attribute, &function.sig)?;
    let (wanted, request) = (attribute.request(&locks), hidden("request"));
    match body {
        Body::Whole(output) => {
            let block = &function.block;
            let locked = under_lock(attribute, &output, &quote!(#block));
            function.block = parse_quote!({
                let #request = #wanted;
                #locked
            });
        }
        Body::Block(output) => {
            // Before the block, where `self` and the arguments still have their names.
            let statements = &mut function.block.stmts;
            let Some(block) = statements.last_mut().and_then(block_in) else {
                return Err(not_async(&function.sig));
            };
            let inner = &block.block;
            let locked = under_lock(attribute, &output, &quote!(#inner));
            block.block = parse_quote!({ #locked });
            block.capture = Some(parse_quote!(move));
            statements.insert(0, parse_quote!(let #request = #wanted;));
        }
    }
    Ok(quote!(#function))
}

/// Runs `body` under the lock of the request.
fn under_lock(attribute: &Attribute, output: &Type, body: &TokenStream) -> TokenStream {
    let (guard, error) = (attribute.guard(), hidden("error"));
    let (request, ran) = (hidden("request"), hidden("ran"));
    // The compiler's errors point at the return type; lints know that the user did not write this.
    let span = output.span().resolved_at(Span::mixed_site());
    let failed = quote_spanned! {span=>
        ::core::result::Result::Err(::core::convert::From::from(#error))
    };
    let skipped = (attribute.busy == Busy::Skip).then(|| {
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

impl Body {
    fn of(function: &ItemFn) -> syn::Result<Self> {
        let signature = &function.sig;
        let no_result = || {
            Err(Error::new_spanned(
                signature,
                "the function must return a Result whose error is From<LockError>: the lock may be busy, or lost",
            ))
        };
        let ReturnType::Type(_, output) = &signature.output else {
            return if signature.asyncness.is_some() {
                no_result()
            } else {
                Err(not_async(signature))
            };
        };
        let body = if signature.asyncness.is_some() {
            Self::Whole((**output).clone())
        } else {
            Self::Block(future_output(output).ok_or_else(|| not_async(signature))?.clone())
        };
        let (Self::Whole(output) | Self::Block(output)) = &body;
        if has_impl(output) {
            return Err(Error::new_spanned(
                output,
                "the return type must be named: it cannot hold an impl Trait",
            ));
        }
        if matches!(output, Type::Tuple(tuple) if tuple.elems.is_empty()) {
            return no_result();
        }
        Ok(body)
    }
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
    if let Some(locks) = &attribute.locks {
        return Ok(quote!(#locks));
    }
    let mut arguments = Arguments::default();
    for argument in &signature.inputs {
        match argument {
            FnArg::Receiver(_) => arguments.receiver = true,
            FnArg::Typed(typed) => arguments.visit_pat(&typed.pat),
        }
    }
    match (arguments.locks, arguments.receiver) {
        (Some(locks), _) => Ok(quote!(#locks)),
        (None, true) => Ok(quote!(self.locks)),
        (None, false) => Err(Error::new_spanned(
            &signature.ident,
            "no argument of the name locks; give the client, as in locks = state.locks",
        )),
    }
}

/// What the arguments bind.
#[derive(Default)]
struct Arguments {
    receiver: bool,
    locks: Option<Ident>,
}

impl<'ast> Visit<'ast> for Arguments {
    fn visit_pat(&mut self, pattern: &'ast Pat) {
        if let Pat::Ident(bound) = pattern
            && bound.ident == "locks"
        {
            self.locks = Some(bound.ident.clone());
        }
        visit::visit_pat(self, pattern);
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

/// `T` of `Pin<Box<dyn Future<Output = T>>>` and of `impl Future<Output = T>`.
fn future_output(output: &Type) -> Option<&Type> {
    let bounds = match output {
        Type::ImplTrait(future) => &future.bounds,
        Type::TraitObject(future) => &future.bounds,
        Type::Path(path) => {
            let PathArguments::AngleBracketed(arguments) = &path.path.segments.last()?.arguments else {
                return None;
            };
            return arguments.args.iter().find_map(|argument| match argument {
                GenericArgument::Type(inner) => future_output(inner),
                _ => None,
            });
        }
        _ => return None,
    };
    bounds.iter().find_map(|bound| match bound {
        TypeParamBound::Trait(TraitBound { path, .. }) => {
            let PathArguments::AngleBracketed(arguments) = &path.segments.last()?.arguments else {
                return None;
            };
            arguments.args.iter().find_map(|argument| match argument {
                GenericArgument::AssocType(output) if output.ident == "Output" => Some(&output.ty),
                _ => None,
            })
        }
        _ => None,
    })
}

fn has_impl(output: &Type) -> bool {
    struct Found(bool);
    impl<'ast> Visit<'ast> for Found {
        fn visit_type_impl_trait(&mut self, _: &'ast syn::TypeImplTrait) {
            self.0 = true;
        }
    }
    let mut found = Found(false);
    found.visit_type(output);
    found.0
}
