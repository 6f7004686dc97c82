//! Servers in containers.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::TryStreamExt as _;
use testcontainers::bollard::models::{
    ContainerSummary, Mount, MountType, NetworkConnectRequest, NetworkDisconnectRequest, PortBinding,
};
use testcontainers::bollard::query_parameters::{
    DownloadFromContainerOptionsBuilder, KillContainerOptionsBuilder, ListContainersOptionsBuilder,
    RemoveContainerOptionsBuilder, UploadToContainerOptionsBuilder,
};
use testcontainers::bollard::{Docker, body_full};
use testcontainers::core::client::docker_client_instance;
use testcontainers::core::{ContainerPort, ImageExt as _};
use testcontainers::runners::AsyncRunner as _;
use testcontainers::{ContainerAsync, GenericImage};
use tokio::signal::unix::{SignalKind, signal};

use super::error::{ServerError, chain};
use super::kind::{Kind, Place};
use super::run::Run;

/// Which run a container belongs to.
const RUN: &str = "fencelock.test.run";
/// Which of the run's servers it is.
const NUMBER: &str = "fencelock.test.server";
/// The network that containers are in unless told otherwise.
const NETWORK: &str = "bridge";
/// How long an engine may take to say that it is there.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often the engine is asked to pause a container. On a busy machine it may give up before all processes of one that
/// makes new ones are frozen; then it lets them go on.
const PAUSES: usize = 10;
/// And after what time it is asked again.
const AGAIN: Duration = Duration::from_millis(50);

/// A server in a container, on a port of this machine's loopback.
#[derive(Debug)]
pub(super) struct Container {
    docker: Docker,
    wish: Wish,
    // There is none only while one takes the place of the other.
    container: Option<ContainerAsync<GenericImage>>,
    copy: Vec<u8>,
}

/// What is to run.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) kind: &'static Kind,
    pub(super) image: String,
    pub(super) port: u16,
    pub(super) arguments: Vec<String>,
}

/// The engine, or why there is none.
pub(super) async fn engine() -> Result<Docker, String> {
    let docker = docker_client_instance().await.map_err(|error| chain(&error))?;
    match tokio::time::timeout(PATIENCE, docker.ping()).await {
        Ok(Ok(_)) => Ok(docker),
        Ok(Err(error)) => Err(format!("no container engine answers: {}", chain(&error))),
        Err(_) => Err(format!("the container engine does not answer within {PATIENCE:?}")),
    }
}

/// Whether the image is there, after it was pulled if it can be, or why it is not.
pub(super) async fn has_image(docker: &Docker, image: &str) -> Result<(), String> {
    if docker.inspect_image(image).await.is_ok() {
        return Ok(());
    }
    let (name, tag) = name_and_tag(image);
    let pulled = GenericImage::new(name, tag).pull_image().await;
    pulled
        .map(drop)
        .map_err(|error| format!("there is no image {image}, and pulling it failed: {}", chain(&error)))
}

impl Container {
    pub(super) async fn start(docker: Docker, wish: Wish) -> Result<Self, ServerError> {
        static FIRST: Once = Once::new();
        let mut first = false;
        FIRST.call_once(|| first = true);
        if first {
            remove_on_signals(docker.clone())?;
            remove(&docker, is_stale).await;
        }
        let container = Some(run(&docker, &wish).await?);
        Ok(Self {
            docker,
            wish,
            container,
            copy: Vec::new(),
        })
    }

    pub(super) async fn pause(&self) -> Result<(), ServerError> {
        let mut left = PAUSES;
        loop {
            left -= 1;
            match self.docker.pause_container(self.id()).await {
                Err(_) if left > 0 && self.is("running").await => tokio::time::sleep(AGAIN).await,
                paused => return paused.map_err(ServerError::engine("pausing a container")),
            }
        }
    }

    pub(super) async fn resume(&self) -> Result<(), ServerError> {
        if !self.is("paused").await {
            return Ok(());
        }
        let resumed = self.docker.unpause_container(self.id()).await;
        resumed.map_err(ServerError::engine("resuming a container"))
    }

    pub(super) async fn kill(&self) -> Result<(), ServerError> {
        if !self.is("running").await && !self.is("paused").await {
            return Ok(());
        }
        let options = KillContainerOptionsBuilder::new().signal("KILL").build();
        let killed = self.docker.kill_container(self.id(), Some(options)).await;
        killed.map_err(ServerError::engine("killing a container"))?;
        // The signal finds a paused container only when it is resumed.
        self.resume().await?;
        while self.runs().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    pub(super) async fn start_again(&self) -> Result<(), ServerError> {
        let started = self.docker.start_container(self.id(), None).await;
        started.map_err(ServerError::engine("starting a container again"))
    }

    pub(super) async fn start_anew(&mut self) -> Result<(), ServerError> {
        if let Some(container) = self.container.take() {
            container
                .rm()
                .await
                .map_err(ServerError::engine("removing a container"))?;
        }
        self.container = Some(run(&self.docker, &self.wish).await?);
        Ok(())
    }

    pub(super) async fn copy(&mut self) -> Result<(), ServerError> {
        let options = DownloadFromContainerOptionsBuilder::new()
            .path(self.wish.kind.data)
            .build();
        let archive = self.docker.download_from_container(self.id(), Some(options));
        let pieces: Vec<_> = archive
            .try_collect()
            .await
            .map_err(ServerError::engine("copying data"))?;
        self.copy = pieces.concat();
        Ok(())
    }

    pub(super) async fn start_with_copy(&mut self) -> Result<(), ServerError> {
        // The engine puts files only where there is a container, and one's data is gone only with it.
        self.start_anew().await?;
        self.kill().await?;
        let parent = Path::new(self.wish.kind.data).parent().unwrap_or(Path::new("/"));
        let options = UploadToContainerOptionsBuilder::new()
            .path(&parent.to_string_lossy())
            .build();
        let archive = body_full(self.copy.clone().into());
        let restored = self.docker.upload_to_container(self.id(), Some(options), archive).await;
        restored.map_err(ServerError::engine("restoring data"))?;
        self.start_again().await
    }

    /// Takes it off its network: the engine closes its connections.
    pub(super) async fn disconnect(&self) -> Result<(), ServerError> {
        let request = NetworkDisconnectRequest {
            container: self.id().to_owned(),
            force: Some(true),
        };
        let disconnected = self.docker.disconnect_network(NETWORK, request).await;
        disconnected.map_err(ServerError::engine("disconnecting a container"))
    }

    pub(super) async fn reconnect(&self) -> Result<(), ServerError> {
        let request = NetworkConnectRequest {
            container: self.id().to_owned(),
            endpoint_config: None,
        };
        let connected = self.docker.connect_network(NETWORK, request).await;
        connected.map_err(ServerError::engine("connecting a container"))
    }

    pub(super) async fn runs(&self) -> bool {
        self.is("running").await || self.is("paused").await
    }

    pub(super) async fn log(&self) -> String {
        let Some(container) = &self.container else {
            return String::new();
        };
        let (out, err) = tokio::join!(container.stdout_to_vec(), container.stderr_to_vec());
        let text = [out.unwrap_or_default(), err.unwrap_or_default()].concat();
        String::from_utf8_lossy(&text).into_owned()
    }

    pub(super) async fn remove(&mut self) {
        if let Some(container) = self.container.take() {
            // What cannot be removed now is removed at the next start.
            let _ = container.rm().await;
        }
    }

    fn id(&self) -> &str {
        self.container.as_ref().map_or("", |container| container.id())
    }

    async fn is(&self, status: &str) -> bool {
        let seen = self.docker.inspect_container(self.id(), None).await;
        let seen = seen
            .ok()
            .and_then(|container| container.state)
            .and_then(|state| state.status);
        seen.is_some_and(|seen| seen.as_ref() == status)
    }
}

async fn run(docker: &Docker, wish: &Wish) -> Result<ContainerAsync<GenericImage>, ServerError> {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed).to_string();
    let (name, tag) = name_and_tag(&wish.image);
    let shared = wish.kind.shares_the_loopback();
    let place = Place {
        contained: true,
        port: if shared { wish.port } else { wish.kind.port },
        data: wish.kind.data,
    };
    let inside = ContainerPort::Tcp(wish.kind.port);
    let binding = PortBinding {
        host_ip: Some("127.0.0.1".to_owned()),
        host_port: Some(wish.port.to_string()),
    };
    let bindings = (!shared).then(|| HashMap::from([(inside.to_string(), Some(vec![binding]))]));
    let command = wish
        .kind
        .command(place)
        .into_iter()
        .chain(wish.arguments.iter().cloned());
    // A volume of its own, which goes with the container: the file system that an engine makes of layers can be slow.
    let data = Mount {
        target: Some(wish.kind.data.to_owned()),
        typ: Some(MountType::VOLUME),
        ..Mount::default()
    };
    let request = GenericImage::new(name, tag)
        .with_cmd(command)
        .with_host_config_modifier(move |config| {
            // Otherwise it would listen on every address of this machine.
            config.port_bindings = bindings.clone();
            config.mounts = Some(vec![data.clone()]);
        })
        .with_label(RUN, Run::this().label())
        .with_label(NUMBER, &number);
    let request = if shared {
        request.with_network("host")
    } else {
        request.with_mapped_port(wish.port, inside)
    };
    let environment = wish.kind.environment().iter();
    let request = environment.fold(request, |request, (key, value)| request.with_env_var(*key, *value));
    let started = request.start().await;
    if started.is_err() {
        // It may have been made and not have started.
        let this = Run::this();
        remove(docker, |container| {
            run_of(container).as_ref() == Some(&this) && label(container, NUMBER) == Some(&number)
        })
        .await;
    }
    started.map_err(ServerError::engine("starting a container"))
}

/// Removes this run's containers on Ctrl-C and the like, and ends the process as these do.
fn remove_on_signals(docker: Docker) -> Result<(), ServerError> {
    for (kind, number) in [
        (SignalKind::interrupt(), 2),
        (SignalKind::terminate(), 15),
        (SignalKind::hangup(), 1),
    ] {
        let mut signals = signal(kind).map_err(ServerError::system("listening for signals"))?;
        let docker = docker.clone();
        tokio::spawn(async move {
            if signals.recv().await.is_some() {
                let this = Run::this();
                remove(&docker, |container| run_of(container).as_ref() == Some(&this)).await;
                std::process::exit(128 + number);
            }
        });
    }
    Ok(())
}

/// Removes those of the tests' containers that are `chosen`. Whatever fails is left to the next run.
async fn remove(docker: &Docker, chosen: impl Fn(&ContainerSummary) -> bool) {
    let filters = HashMap::from([("label", vec![RUN])]);
    let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
    let containers = docker.list_containers(Some(options)).await.unwrap_or_default();
    for container in containers.iter().filter(|container| chosen(container)) {
        let options = RemoveContainerOptionsBuilder::new().force(true).v(true).build();
        let id = container.id.as_deref().unwrap_or_default();
        let _ = docker.remove_container(id, Some(options)).await;
    }
}

fn label<'a>(container: &'a ContainerSummary, key: &str) -> Option<&'a String> {
    container.labels.as_ref()?.get(key)
}

/// Whether the run that started it is over. Of runs elsewhere that cannot be known, but none takes a day.
fn is_stale(container: &ContainerSummary) -> bool {
    const DAY: u64 = 24 * 60 * 60;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let created = container.created.and_then(|seconds| u64::try_from(seconds).ok());
    let is_old = created.is_some_and(|created| now.as_secs() > created + DAY);
    run_of(container).is_some_and(|run| run.is_over() || (is_old && !run.is_from_here()))
}

fn run_of(container: &ContainerSummary) -> Option<Run> {
    Run::of_label(label(container, RUN)?)
}

/// The parts of an image's name. A colon may also be part of a registry's address.
fn name_and_tag(image: &str) -> (&str, &str) {
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, tag),
        _ => (image, "latest"),
    }
}

#[cfg(test)]
mod tests {
    use super::name_and_tag;

    #[test]
    fn an_image_has_a_name_and_a_tag() {
        assert_eq!(name_and_tag("redis:8"), ("redis", "8"));
        assert_eq!(name_and_tag("redis"), ("redis", "latest"));
        assert_eq!(
            name_and_tag("127.0.0.1:5000/a/redis"),
            ("127.0.0.1:5000/a/redis", "latest")
        );
        assert_eq!(name_and_tag("127.0.0.1:5000/redis:8"), ("127.0.0.1:5000/redis", "8"));
    }
}
