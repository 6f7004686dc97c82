//! One instance of the service: a process of its own with a port of its own.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use axum::Extension;
use fencelock::FencingToken;
use tokio::net::TcpListener;

use crate::Outcome;
use crate::lines::{end_with_parent, listen, say, say_failed};
use crate::payment::Payments;
use crate::service::{self, Shop};
use crate::stock::store;

/// Serves until the process is killed or its input ends.
pub(crate) async fn run(run: &str, act: &str, endless_payment: Option<&str>) -> ExitCode {
    end_with_parent();
    thread::spawn(|| {
        while listen().is_ok() {}
        std::process::exit(1);
    });
    match serve(run, act, endless_payment).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say_failed(&error);
            ExitCode::FAILURE
        }
    }
}

async fn serve(run: &str, act: &str, endless_payment: Option<&str>) -> Outcome<()> {
    let act: usize = act.parse()?;
    let url = std::env::var(fencelock::ENV)?;
    let shop = Shop {
        store: store::connect(&url, run, act).await?,
        payments: Arc::new(Payments::new(endless_payment.map(str::parse).transpose()?)),
    };
    let app = match act {
        // The handler does not run without a token, and the same token for all requests is as good as none.
        crate::WITHOUT_LOCK => service::routes(shop).layer(Extension(FencingToken::new(1)?)),
        _ => service::app(shop, fencelock::connect(&url).await?, format!("http-shop/{run}")),
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    say(format_args!("ready {}", listener.local_addr()?.port()))?;
    Ok(axum::serve(listener, app).await?)
}
