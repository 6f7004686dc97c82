//! Servers in containers.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use futures_util::TryStreamExt as _;
use testcontainers::bollard::models::{ContainerSummary, Mount, MountType, PortBinding};
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
use tokio::sync::OnceCell;
use tokio::time::{sleep, timeout};

use crate::kind::{Kind, Place};
use crate::machine::{Data, Machine};
use crate::run;

/// The label that names the process that a container belongs to.
const RUN: &str = "fencelock.test.run";
/// How long an engine may take to say that it is there.
const LONGEST_ANSWER: Duration = Duration::from_secs(5);
/// How often the engine is asked to pause a container. On a busy machine it may give up before all processes of one that
/// makes new ones are frozen; then it lets them go on.
const PAUSES: usize = 10;
/// And after what time it is asked again.
const AGAIN: Duration = Duration::from_millis(50);

/// A server in a container, on a port of this machine's loopback.
pub(crate) struct Container {
    docker: Docker,
    kind: Kind,
    image: String,
    port: u16,
    arguments: Vec<String>,
    /// There is none only while one takes the place of the other.
    container: Option<ContainerAsync<GenericImage>>,
    copy: Vec<u8>,
}

async fn engine() -> Result<Docker> {
    let docker = docker_client_instance().await?;
    let answer = timeout(LONGEST_ANSWER, docker.ping()).await;
    answer
        .context("the container engine does not answer")?
        .context("no container engine answers")?;
    Ok(docker)
}

/// The image of that kind, after it was pulled if it was not there, or why there is none.
pub(crate) async fn image(kind: &Kind) -> Result<String> {
    let (docker, image) = (engine().await?, kind.wanted_image());
    if docker.inspect_image(&image).await.is_err() {
        let (name, tag) = name_and_tag(&image);
        let pulled = GenericImage::new(name, tag).pull_image().await;
        drop(pulled.with_context(|| format!("there is no image {image}, and pulling it failed"))?);
    }
    Ok(image)
}

impl Container {
    pub(crate) async fn start(kind: Kind, image: String, port: u16, arguments: Vec<String>) -> Result<Self> {
        static CLEANED_UP: OnceCell<()> = OnceCell::const_new();
        let docker = engine().await?;
        let clean_up = async || {
            remove_on_signals(&docker)?;
            remove(&docker, is_stale).await;
            Ok::<_, anyhow::Error>(())
        };
        CLEANED_UP.get_or_try_init(clean_up).await?;
        let mut container = Self {
            docker,
            kind,
            image,
            port,
            arguments,
            container: None,
            copy: Vec::new(),
        };
        container.run().await?;
        Ok(container)
    }

    async fn run(&mut self) -> Result<()> {
        let (name, tag) = name_and_tag(&self.image);
        let shared = self.kind.shares_the_loopback();
        let place = Place {
            contained: true,
            port: if shared { self.port } else { self.kind.port },
            data: self.kind.data,
        };
        let inside = ContainerPort::Tcp(self.kind.port);
        let binding = PortBinding {
            host_ip: Some("127.0.0.1".to_owned()),
            host_port: Some(self.port.to_string()),
        };
        let bindings = (!shared).then(|| HashMap::from([(inside.to_string(), Some(vec![binding]))]));
        let arguments = self.arguments.iter().cloned();
        // A volume of its own, which goes with the container: the file system that an engine makes of layers can be slow.
        let data = Mount {
            target: Some(self.kind.data.to_owned()),
            typ: Some(MountType::VOLUME),
            ..Mount::default()
        };
        let request = GenericImage::new(name, tag)
            .with_cmd(self.kind.command(place).into_iter().chain(arguments))
            .with_host_config_modifier(move |config| {
                // Otherwise it would listen on every address of this machine.
                config.port_bindings = bindings.clone();
                config.mounts = Some(vec![data.clone()]);
            })
            .with_label(RUN, run::label());
        let request = match shared {
            true => request.with_network("host"),
            false => request.with_mapped_port(self.port, inside),
        };
        let environment = self.kind.environment();
        let request = environment
            .into_iter()
            .fold(request, |request, (key, value)| request.with_env_var(key, value));
        // One that was made and has not started is removed by the next run.
        self.container = Some(request.start().await.context("starting a container")?);
        Ok(())
    }

    fn id(&self) -> &str {
        self.container.as_ref().map_or("", |container| container.id())
    }

    async fn is(&self, status: &str) -> bool {
        let seen = self.docker.inspect_container(self.id(), None).await.ok();
        let seen = seen.and_then(|container| container.state?.status);
        seen.is_some_and(|seen| seen.as_ref() == status)
    }
}

#[async_trait]
impl Machine for Container {
    async fn pause(&mut self) -> Result<()> {
        let mut left = PAUSES;
        loop {
            left -= 1;
            match self.docker.pause_container(self.id()).await {
                Err(_) if left > 0 && self.is("running").await => sleep(AGAIN).await,
                paused => return paused.context("pausing a container"),
            }
        }
    }

    async fn resume(&mut self) -> Result<()> {
        if !self.is("paused").await {
            return Ok(());
        }
        let resumed = self.docker.unpause_container(self.id()).await;
        resumed.context("resuming a container")
    }

    async fn kill(&mut self) -> Result<()> {
        if !self.runs().await {
            return Ok(());
        }
        let options = KillContainerOptionsBuilder::new().signal("KILL").build();
        let killed = self.docker.kill_container(self.id(), Some(options)).await;
        killed.context("killing a container")?;
        // The signal finds a paused container only when it is resumed.
        self.resume().await?;
        while self.runs().await {
            sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    async fn start_again(&mut self, data: Data) -> Result<()> {
        if data != Data::Kept {
            // The data goes only with its container.
            if let Some(container) = self.container.take() {
                container.rm().await.context("removing a container")?;
            }
            self.run().await?;
        }
        if data == Data::Copied {
            self.kill().await?;
            let parent = Path::new(self.kind.data).parent().unwrap_or(Path::new("/"));
            let options = UploadToContainerOptionsBuilder::new().path(&parent.to_string_lossy());
            let archive = body_full(self.copy.clone().into());
            let restored = self
                .docker
                .upload_to_container(self.id(), Some(options.build()), archive);
            restored.await.context("restoring data")?;
        }
        if data == Data::Lost {
            return Ok(());
        }
        let started = self.docker.start_container(self.id(), None).await;
        started.context("starting a container again")
    }

    async fn copy(&mut self) -> Result<()> {
        let options = DownloadFromContainerOptionsBuilder::new().path(self.kind.data).build();
        let archive = self.docker.download_from_container(self.id(), Some(options));
        let pieces: Vec<_> = archive.try_collect().await.context("copying data")?;
        self.copy = pieces.concat();
        Ok(())
    }

    async fn runs(&mut self) -> bool {
        self.is("running").await || self.is("paused").await
    }

    async fn log(&self) -> String {
        let Some(container) = &self.container else {
            return String::new();
        };
        let (out, err) = tokio::join!(container.stdout_to_vec(), container.stderr_to_vec());
        let text = [out.unwrap_or_default(), err.unwrap_or_default()].concat();
        String::from_utf8_lossy(&text).into_owned()
    }

    async fn remove(&mut self) {
        if let Some(container) = self.container.take() {
            // What cannot be removed now is removed at the next start.
            let _ = container.rm().await;
        }
    }
}

/// Removes the containers of this process on Ctrl-C and the like, and ends the process as these do.
fn remove_on_signals(docker: &Docker) -> Result<()> {
    for (kind, number) in [
        (SignalKind::interrupt(), 2),
        (SignalKind::terminate(), 15),
        (SignalKind::hangup(), 1),
    ] {
        let mut signals = signal(kind).context("listening for signals")?;
        let docker = docker.clone();
        tokio::spawn(async move {
            if signals.recv().await.is_some() {
                remove(&docker, |container| label(container) == Some(&run::label())).await;
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

fn label(container: &ContainerSummary) -> Option<&String> {
    container.labels.as_ref()?.get(RUN)
}

/// Whether the process that started it has ended. Of processes elsewhere that cannot be known, but no run takes a day.
fn is_stale(container: &ContainerSummary) -> bool {
    const DAY: u64 = 24 * 60 * 60;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let created = container.created.and_then(|seconds| u64::try_from(seconds).ok());
    let is_old = || created.is_some_and(|created| now.as_secs() > created + DAY);
    let is_over = label(container).and_then(|label| run::is_over(label));
    is_over.unwrap_or_else(is_old)
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
        for name in ["redis", "127.0.0.1:5000/redis"] {
            assert_eq!(name_and_tag(name), (name, "latest"));
            assert_eq!(name_and_tag(&format!("{name}:8")), (name, "8"));
        }
    }
}
