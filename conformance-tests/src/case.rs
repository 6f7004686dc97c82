//! What a case has to work with.

mod looking;
#[cfg(feature = "faults")]
mod proxied;
mod taking;

pub(crate) use taking::{is_over, renews, rises};

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::fence::Fence;
use lock_core::{Capabilities, Claim, Clock, DistributedLock, LockName, Locks, Options, Scope, Stamp};
use tokio::runtime::Handle;

use crate::broken::{Breakage, Bug};
use crate::child::{COUNTER, Child};
use crate::harness::{Fault, Harness, Injection, Namespace, Resource};
use crate::history::History;
use crate::link::Link;
use crate::oracle::Log;
use crate::outcome::{Outcome, Stop, ensure};

/// What every case calls its resource.
pub(crate) const RESOURCE: &str = "the resource";

/// How a case is run.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// The row, for child processes.
    pub(crate) row: Arc<str>,
    /// Whether it has a server of its own.
    pub(crate) own_server: bool,
    /// What is planted into its clients.
    pub(crate) bug: Option<Bug>,
    /// How long it waits for what should happen: beyond any time that a busy machine takes.
    pub(crate) hang_limit: Duration,
}

/// One run of one case: a fresh namespace, clients of it, and a record of what happened.
pub(crate) struct Case {
    harness: Arc<dyn Harness>,
    terms: Terms,
    namespace: Namespace,
    history: Arc<History>,
    capabilities: Capabilities,
    breakage: Option<Breakage>,
    // Looks at the server beside the clients under test.
    observer: Arc<dyn DistributedLock>,
    clients: AtomicUsize,
    open: Mutex<Open>,
    findings: Mutex<Findings>,
    needs_own_server: AtomicBool,
}

/// What is to be closed when the case is over.
#[derive(Default)]
struct Open {
    links: Vec<Arc<Link>>,
    locks: Vec<Locks>,
    // Behind them are some of the clients above, which could not close without.
    #[cfg(feature = "faults")]
    proxies: Vec<Arc<crate::faults::Proxy>>,
}

/// What a case measured beside passing or failing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Findings {
    /// The smallest time between the end of a holder's belief and the next grant.
    pub(crate) margin: Option<Duration>,
    /// Faults after which two holders believed at the same time.
    pub(crate) overlaps: Vec<&'static str>,
    /// What could not be judged because the machine was too busy.
    pub(crate) too_slow: Vec<String>,
    /// Figures worth printing.
    pub(crate) remarks: Vec<String>,
}

/// One user of the backend: the locks, and the way to the backend that they stand on.
#[derive(Clone)]
pub(crate) struct Party {
    pub(crate) locks: Locks,
    pub(crate) link: Arc<Link>,
}

impl Case {
    pub(crate) async fn new(harness: Arc<dyn Harness>, terms: Terms) -> Outcome<Arc<Self>> {
        let namespace = Namespace::fresh(terms.own_server)?;
        let breakage = terms.bug.map(Breakage::new);
        let observer = broken(breakage.as_ref(), harness.client(&namespace).await?);
        Ok(Arc::new(Self {
            capabilities: observer.capabilities(),
            history: Arc::new(History::new()),
            clients: AtomicUsize::new(0),
            open: Mutex::default(),
            findings: Mutex::default(),
            needs_own_server: AtomicBool::new(false),
            harness,
            terms,
            namespace,
            breakage,
            observer,
        }))
    }

    // Clients.

    /// A client that shares nothing with the others but the server.
    pub(crate) async fn client(&self) -> Outcome<Arc<Link>> {
        let link = Arc::new(self.link().await?);
        self.open().links.push(Arc::clone(&link));
        Ok(link)
    }

    /// The same, with its acknowledged refreshes in the oracle's log.
    pub(crate) async fn logged_party(&self, log: &Arc<Log>, options: Options) -> Outcome<Party> {
        let link = self.link().await?.with_log(Arc::clone(log), &*self.harness);
        Ok(self.party_on(Arc::new(link), options))
    }

    /// Locks on a client of their own.
    pub(crate) async fn party(&self) -> Outcome<Party> {
        Ok(self.party_on(Arc::new(self.link().await?), Options::new()))
    }

    async fn link(&self) -> Outcome<Link> {
        Ok(self.linked(self.harness.client(&self.namespace).await?))
    }

    fn linked(&self, client: Arc<dyn DistributedLock>) -> Link {
        let client = broken(self.breakage.as_ref(), client);
        let number = self.clients.fetch_add(1, Ordering::Relaxed) + 1;
        Link::new(client, number, Arc::clone(&self.history))
    }

    /// Locks on a client of their own, both of which work on that runtime.
    pub(crate) async fn party_on_runtime(&self, runtime: &Handle) -> Outcome<Party> {
        let client = self.harness.client_on(&self.namespace, runtime.clone()).await?;
        let options = Options::new().runtime(runtime.clone());
        // It is not shut down at the end of the case, as it has ended with its runtime by then.
        Ok(self.party_with(Arc::new(self.linked(client)), options))
    }

    fn party_on(&self, link: Arc<Link>, options: Options) -> Party {
        let party = self.party_with(link, options);
        self.open().locks.push(party.locks.clone());
        party
    }

    fn party_with(&self, link: Arc<Link>, options: Options) -> Party {
        let backend: Arc<dyn DistributedLock> = Arc::clone(&link) as _;
        let locks = Locks::with_options(backend, options.ttl(self.kept_ttl()));
        Party { locks, link }
    }

    /// A process of its own with a client of this namespace.
    pub(crate) async fn child(&self) -> Outcome<Child> {
        self.child_adapted(|_| {}).await
    }

    /// The same, with that wall clock.
    #[cfg(all(unix, feature = "faults"))]
    pub(crate) async fn child_with_clock(&self, clock: &crate::faults::WallClock) -> Outcome<Child> {
        self.child_adapted(|command| clock.govern(command)).await
    }

    async fn child_adapted(&self, adapt: impl FnOnce(&mut std::process::Command)) -> Outcome<Child> {
        self.needs_processes()?;
        let environment = self.harness.child_environment(&self.namespace);
        Child::start(&self.terms.row, &self.namespace, environment, &self.history, adapt).await
    }

    // What this backend can do.

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    pub(crate) fn needs_processes(&self) -> Outcome {
        if self.capabilities.scope == Scope::Process {
            return Err(Stop::not_applicable("the locks exclude within one process only"));
        }
        Ok(())
    }

    pub(crate) fn needs(&self, capability: bool, reason: &str) -> Outcome {
        if capability {
            Ok(())
        } else {
            Err(Stop::not_applicable(reason))
        }
    }

    /// Does the fault, or ends the case as not applicable.
    pub(crate) async fn inject(&self, fault: Fault) -> Outcome {
        match self.harness.inject(&self.namespace, &fault).await? {
            Injection::Done => {
                self.note(format!("fault: {fault:?}"));
                Ok(())
            }
            Injection::NotPossible => Err(Stop::not_applicable(format!(
                "the harness cannot bring about {}",
                fault.words()
            ))),
            Injection::NeedsOwnServer => {
                self.needs_own_server.store(true, Ordering::Relaxed);
                Err(Stop::not_applicable(format!(
                    "the harness brings about {} only on a server of one's own",
                    fault.words()
                )))
            }
        }
    }

    /// Whether the case could not go on because it shares its server.
    pub(crate) fn needs_own_server(&self) -> bool {
        self.needs_own_server.load(Ordering::Relaxed)
    }

    /// The file in which child processes count.
    pub(crate) fn counter(&self) -> PathBuf {
        self.namespace.folder().join(COUNTER)
    }

    /// A resource that refuses stale tokens: what the backend ships, or else the fence in memory.
    pub(crate) async fn resource(&self) -> Outcome<Arc<dyn Resource>> {
        if let Some(broken) = self.breakage.as_ref().and_then(Breakage::resource) {
            return Ok(broken);
        }
        let shipped = self.harness.resource(&self.namespace, RESOURCE).await?;
        Ok(shipped.unwrap_or_else(|| Arc::new(Fence::new(RESOURCE, 0))))
    }

    /// A new handle to the resource that the backend ships, as after a restart of whoever uses it.
    pub(crate) async fn shipped_resource(&self) -> Outcome<Arc<dyn Resource>> {
        let shipped = self.harness.resource(&self.namespace, RESOURCE).await?;
        shipped.ok_or_else(|| Stop::not_applicable("the backend ships no resource that outlives its process"))
    }

    #[cfg(feature = "faults")]
    pub(crate) fn leases_are_connections(&self) -> bool {
        self.harness.leases_are_connections()
    }

    pub(crate) fn needs_no_runtime(&self) -> Outcome {
        if self.harness.connects_without_runtime() {
            return Ok(());
        }
        Err(Stop::not_applicable("a client is made on a tokio runtime"))
    }

    pub(crate) fn fewest_polls(&self) -> usize {
        self.harness.fewest_polls()
    }

    // Names and times.

    pub(crate) fn name(&self, name: &str) -> LockName {
        #[expect(clippy::expect_used, reason = "the suite's own names are usable")]
        LockName::new(name).expect("a usable name")
    }

    /// The ttl of what is to end in a case.
    pub(crate) fn ttl(&self) -> Duration {
        self.ttl_of(Duration::from_secs(2))
    }

    /// The ttl of what is renewed for several ttls in a case: a machine that stands still for three seconds loses nothing.
    pub(crate) fn steady_ttl(&self) -> Duration {
        self.ttl_of(Duration::from_secs(5))
    }

    /// The ttl of what is only to stay held: beyond the hang limit, so that nothing that should be released passes because its lease
    /// ended. The default of parties.
    pub(crate) fn kept_ttl(&self) -> Duration {
        self.ttl_of(5 * self.hang_limit())
    }

    /// A ttl as near to `wanted` as the backend grants.
    pub(crate) fn ttl_of(&self, wanted: Duration) -> Duration {
        let granularity = self
            .capabilities
            .ttl_granularity
            .max(Duration::from_millis(1))
            .as_nanos();
        let rounded = wanted.as_nanos().div_ceil(granularity) * granularity;
        let rounded = Duration::from_nanos(u64::try_from(rounded).unwrap_or(u64::MAX));
        rounded.clamp(self.capabilities.min_ttl, self.capabilities.max_ttl)
    }

    /// How long is waited for what should happen: never a measure of speed, whatever takes longer hangs.
    pub(crate) fn hang_limit(&self) -> Duration {
        self.terms.hang_limit
    }

    pub(crate) fn op_timeout(&self) -> Duration {
        self.capabilities.op_timeout
    }

    pub(crate) fn now(&self) -> Stamp {
        Clock::system().now()
    }

    /// A claim that nothing but its own renewal keeps alive.
    pub(crate) fn claim(&self, name: &str) -> Claim {
        Claim::new(self.name(name), self.ttl_of(Duration::from_secs(10))).with_own_lease()
    }

    /// The same, for a lock that is to end by itself.
    pub(crate) fn brief_claim(&self, name: &str) -> Claim {
        Claim::new(self.name(name), self.ttl()).with_own_lease()
    }

    // What was found.

    pub(crate) fn note(&self, event: impl Into<String>) {
        self.history.note(event);
    }

    pub(crate) fn remark(&self, remark: impl Into<String>) {
        self.findings_mut().remarks.push(remark.into());
    }

    /// Says that this could be judged only on a machine that is less busy. It is counted.
    pub(crate) fn too_slow(&self, what: impl Into<String>) {
        self.findings_mut().too_slow.push(what.into());
    }

    /// A holder believed until `belief_end`, and the next one from `next` on: the first must come before the second.
    pub(crate) fn in_turn(&self, belief_end: Stamp, next: Stamp) -> Outcome {
        ensure!(
            belief_end < next,
            "the holder",
            "it stops believing before the next one is granted; it believed {:?} longer",
            belief_end.since(next)
        );
        Ok(())
    }

    /// The same, where the end of the lease alone made room for the next one: how far apart they are is a finding.
    pub(crate) fn margin(&self, belief_end: Stamp, next: Stamp) -> Outcome {
        self.in_turn(belief_end, next)?;
        let margin = next.since(belief_end);
        let mut findings = self.findings_mut();
        findings.margin = Some(findings.margin.map_or(margin, |m| m.min(margin)));
        Ok(())
    }

    pub(crate) fn overlap(&self, fault: &'static str) {
        self.findings_mut().overlaps.push(fault);
    }

    pub(crate) fn findings(&self) -> Findings {
        self.findings_mut().clone()
    }

    pub(crate) fn history(&self) -> String {
        self.history.render()
    }

    /// Nothing may be left, first while the clients live, then after they are closed.
    pub(crate) async fn finish(&self) -> Outcome {
        self.only_leftovers(0).await?;
        self.close().await?;
        self.only_leftovers(0).await
    }

    pub(crate) async fn close(&self) -> Outcome {
        let open = std::mem::take(&mut *self.open());
        #[cfg(feature = "faults")]
        for proxy in &open.proxies {
            proxy.heal().await;
        }
        for locks in open.locks {
            locks.shutdown().await?;
        }
        for link in open.links {
            link.close().await?;
        }
        Ok(())
    }

    /// The last that is done.
    pub(crate) async fn over(&self) {
        // Its connections would be in the way of a server that ends.
        let _ = self.observer.close().await;
        self.harness.over(&self.namespace).await;
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn findings_mut(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn broken(breakage: Option<&Breakage>, client: Arc<dyn DistributedLock>) -> Arc<dyn DistributedLock> {
    match breakage {
        Some(breakage) => breakage.of(client),
        None => client,
    }
}
