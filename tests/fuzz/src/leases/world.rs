//! The lender, its peers, and the connections between them.

use std::{collections::VecDeque, path::PathBuf, time::Duration};

use farside_daemon::{DeviceId, LenderName, VmName};
use farside_lender_protocol::{
    Availability, Channel, DeviceEntry, Envelope, Generation, HeldFence, RemoteError, Reply,
    Request, Revocation, Transport, VERSION,
};
use tempfile::TempDir;

use super::{
    chains::Chains,
    check::{Cause, Ledger, Shown},
    device::Device,
    host::{DEVICES, HOSTS, Host, OPERATOR_HOST, VMS, identity, is_operator, may},
    operate::add_device,
};
use crate::{
    fences::FenceBook,
    input::Input,
    lease_owner::LeaseOwner,
    registry::{Going, Grant, GrantedChain, Lease, Registry, Release, Viewer},
    requests::{self, Answer, Borrow, Peer, Pending, viewer},
};

/// Most connections at a time.
const MAX_CONNECTIONS: usize = 12;
/// How many requests of a host can be repeated.
const MAX_SENT: usize = 32;

thread_local! {
    /// In memory where there is such a directory: each handover writes the file.
    static DIRECTORY: TempDir = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .expect("a temporary directory");
}

/// The lender's end of a connection.
enum End {
    /// Its thread waits for a request.
    Idle(Channel, Option<Peer>),
    /// Its thread waits for the device's.
    Asking(Channel, Option<Peer>, Pending),
    /// Closed, or a lease.
    Gone,
}

pub(super) struct Connection {
    pub(super) host: usize,
    /// The host's end; none if it is closed.
    client: Option<Channel>,
    end: End,
    /// The VM that the lender has from Hello.
    pub(super) vm: Option<VmName>,
    /// The device of the request that its thread serves.
    device: Option<usize>,
    /// The migrations of requests without a reply.
    asked: VecDeque<Option<usize>>,
}

pub struct World {
    name: LenderName,
    pub(super) registry: Registry,
    pub(super) devices: Vec<Device>,
    pub(super) connections: Vec<Connection>,
    pub(super) hosts: Vec<Host>,
    pub(super) ledgers: Vec<Ledger>,
    /// The change that this step may have made: device, cause.
    pub(super) cause: Option<(usize, Cause)>,
    pub(super) chains: Chains,
    file: PathBuf,
    /// The number of secrets that hosts have made.
    pub(super) secrets: u64,
}

impl World {
    pub fn new() -> Self {
        let file = DIRECTORY.with(|directory| directory.path().join("lender.json"));
        match std::fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
            _ => {}
        }
        let chains = Chains::new();
        let (registry, devices) = start_lender(&file, Generation(1), &chains);
        Self {
            name: name("lender"),
            registry,
            devices,
            connections: Vec::new(),
            hosts: (0..HOSTS).map(|_| Host::default()).collect(),
            ledgers: DEVICES.iter().map(|_| Ledger::new()).collect(),
            cause: None,
            chains,
            file,
            secrets: 0,
        }
    }

    /// A host connects, and sends Hello.
    pub fn connect(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        let vm = VMS.get(usize::from(choice >> 4) % 3);
        self.open(usize::from(choice) % HOSTS, vm.copied());
    }

    /// Returns the connection, unless there are too many.
    pub(super) fn open(&mut self, host: usize, vm: Option<&str>) -> Option<usize> {
        if self.connections.len() == MAX_CONNECTIONS {
            self.connections.retain(|connection| {
                connection.client.is_some() || !matches!(connection.end, End::Gone)
            });
            if self.connections.len() == MAX_CONNECTIONS {
                return None;
            }
        }
        let (client, end) = Channel::pair().expect("a pair of sockets");
        self.connections.push(Connection {
            host,
            client: Some(client),
            end: End::Idle(end, None),
            vm: None,
            device: None,
            asked: VecDeque::new(),
        });
        let hello = Request::Hello {
            version: VERSION,
            vm: vm.map(str::to_owned),
        };
        let last = self.connections.len() - 1;
        self.post(last, hello, None);
        Some(last)
    }

    pub(super) fn pick(&self, input: &mut Input<'_>) -> Option<usize> {
        let choice = usize::from(input.u8());
        choice.checked_rem(self.connections.len())
    }

    pub(super) fn post(&mut self, at: usize, request: Request, migration: Option<usize>) {
        let envelope = Envelope {
            generation: Generation(0),
            accesses: 0,
            request,
        };
        self.post_envelope(at, envelope, migration);
    }

    pub(super) fn post_envelope(
        &mut self,
        at: usize,
        envelope: Envelope,
        migration: Option<usize>,
    ) {
        let connection = &mut self.connections[at];
        let Some(client) = &mut connection.client else {
            return;
        };
        // Fails if the lender has closed the connection, or does not read it.
        if let Ok(true) = client.try_send(&envelope, &[]) {
            connection.asked.push_back(migration);
            let sent = &mut self.hosts[connection.host].sent;
            if sent.len() < MAX_SENT {
                sent.push(envelope);
            }
        }
    }

    /// A host closes a connection, whatever is under way.
    pub fn disconnect(&mut self, input: &mut Input<'_>) {
        if let Some(at) = self.pick(input) {
            self.connections[at].client = None;
        }
    }

    /// The other host of a migration gets its fence, and the source forgets its own.
    pub fn tell_destination(&mut self, input: &mut Input<'_>) {
        let (host, choice) = (usize::from(input.u8()) % HOSTS, usize::from(input.u8()));
        let migrations = &self.hosts[host].migrations;
        let Some(index) = choice.checked_rem(migrations.len()) else {
            return;
        };
        let chosen = migrations[index].clone();
        if let Some(generation) = chosen.fence {
            let held = HeldFence {
                generation,
                secret: Some(chosen.secret),
            };
            let key = (chosen.vm, chosen.device);
            self.hosts[host].held.remove(&key);
            self.hosts[chosen.destination].held.insert(key, held);
        }
    }

    /// A host reads a reply.
    pub fn read(&mut self, input: &mut Input<'_>) {
        let Some(at) = self.pick(input) else { return };
        let connection = &mut self.connections[at];
        let Some(client) = &mut connection.client else {
            return;
        };
        match client.try_receive::<Reply>() {
            Ok(Some((reply, _))) => {
                let asked = connection.asked.pop_front().flatten();
                if let (Reply::Fence { generation }, Some(index)) = (reply, asked) {
                    let migrations = &mut self.hosts[connection.host].migrations;
                    migrations[index].fence = Some(generation);
                }
            }
            Ok(None) => {}
            Err(_) => connection.client = None,
        }
    }

    /// A connection's thread at the lender runs until it has to wait.
    pub fn serve(&mut self, input: &mut Input<'_>) {
        if let Some(at) = self.pick(input) {
            self.serve_connection(at);
        }
    }

    fn serve_connection(&mut self, at: usize) {
        let end = std::mem::replace(&mut self.connections[at].end, End::Gone);
        self.connections[at].end = match end {
            End::Gone => End::Gone,
            End::Asking(channel, peer, pending) => {
                let identity = identity(self.connections[at].host);
                let viewer = viewer(&identity, peer.as_ref());
                match pending.receive(Duration::ZERO, &self.registry, &viewer) {
                    Some(answered) => self.reply(at, channel, peer, answered),
                    None => End::Asking(channel, peer, pending),
                }
            }
            End::Idle(mut channel, peer) => match channel.try_receive::<Envelope>() {
                Ok(Some((envelope, _))) => self.answer(at, channel, peer, envelope.request),
                Ok(None) => End::Idle(channel, peer),
                Err(_) => End::Gone,
            },
        };
    }

    fn answer(
        &mut self,
        at: usize,
        channel: Channel,
        mut peer: Option<Peer>,
        request: Request,
    ) -> End {
        let host = self.connections[at].host;
        if let (Request::Registers { token }, None) = (&request, &peer) {
            let now = std::time::Instant::now();
            let tokens = self.registry.tokens();
            let redeemed = tokens.redeem(*token, &identity(host), now);
            assert!(redeemed.is_none(), "a token that was never issued");
            return End::Gone;
        }
        let identity = identity(host);
        self.cause = match self.connections[at].vm {
            // A VM's connection only borrows.
            Some(_) => None,
            None => cause(host, &request),
        };
        self.connections[at].device = self.cause.as_ref().map(|(device, _)| *device);
        let hello = match &request {
            Request::Hello { vm, .. } => vm.clone(),
            _ => None,
        };
        let answered = requests::answer(
            request,
            &self.name,
            &Default::default(),
            &self.registry,
            &mut peer,
            &identity,
        );
        match answered {
            Ok(Answer::Operate(request)) => {
                let rights = viewer(&identity, peer.as_ref()).names_no_vm("tools operate");
                let answered = rights.and_then(|()| self.operate(host, request));
                self.reply(at, channel, peer, answered)
            }
            Ok(Answer::LimitsInUse) => {
                let reply = Reply::LimitsInUse(Vec::new());
                self.reply(at, channel, peer, Ok(reply))
            }
            Ok(Answer::Later(pending)) => End::Asking(channel, peer, pending),
            Ok(Answer::Reply(reply)) => {
                if let (Reply::Welcome { .. }, Some(vm)) = (&reply, hello) {
                    self.connections[at].vm = vm.parse().ok();
                }
                self.reply(at, channel, peer, Ok(reply))
            }
            Ok(Answer::Borrow(borrow)) => self.borrow(at, channel, peer, borrow),
            Err(error) => self.reply(at, channel, peer, Err(error)),
        }
    }

    fn borrow(&mut self, at: usize, channel: Channel, peer: Option<Peer>, borrow: Borrow) -> End {
        let Borrow {
            device,
            owner,
            transport,
            fence,
            going,
        } = borrow;
        let vm = owner.vm().clone();
        let host = self.connections[at].host;
        let cause = Cause::Borrow {
            host,
            vm: vm.clone(),
            shown: fence,
        };
        let index = index(&device);
        self.cause = index.map(|index| (index, cause));
        let resumes = going.and_then(|going| going.resumes);
        let error = match grant(&self.registry, &device, &owner, fence, going) {
            Ok((grant, chain)) => {
                let index = index.expect("a device");
                self.chains.begin(index, &vm, resumes, chain);
                let generation = grant.generation();
                let lease = Lease {
                    connection: channel,
                    owner,
                    generation,
                    transport,
                    bar_memory: Vec::new(),
                    state: None,
                    chain,
                };
                grant.post(lease).expect("the device's thread has room");
                return End::Gone;
            }
            Err(error) => error,
        };
        if let Some(index) = index {
            self.chains.check_refusal(index, &vm, resumes, &error);
        }
        self.reply(at, channel, peer, Err(error))
    }

    fn reply(
        &mut self,
        at: usize,
        mut channel: Channel,
        peer: Option<Peer>,
        answered: Result<Reply, RemoteError>,
    ) -> End {
        let reply = answered.unwrap_or_else(Reply::Refused);
        self.check_reply(at, &reply);
        if let (Reply::Fence { generation }, Some(device)) = (&reply, self.connections[at].device) {
            let fence = *generation;
            let lease = self.devices[device].lease();
            let older = lease.is_some_and(|lease| lease.generation < fence);
            assert!(!older, "handed over, and a lease before it has not ended");
            let answered = &mut self.ledgers[device].answered;
            *answered = fence.max(*answered);
        }
        match channel.try_send(&reply, &[]) {
            Ok(true) => End::Idle(channel, peer),
            // It does not read: dropped.
            Ok(false) | Err(_) => End::Gone,
        }
    }

    /// Rights, and secrets, which no reply has.
    fn check_reply(&self, at: usize, reply: &Reply) {
        let Connection { host, vm, .. } = &self.connections[at];
        let check = |entry: &DeviceEntry| {
            let device = index(&entry.id).expect("a device");
            assert!(may(*host, device, vm.as_ref()), "listed to {host}");
            for fence in &entry.fences {
                let own = vm.as_ref() == Some(&fence.vm);
                let tool = vm.is_none() && is_operator(*host);
                assert!(own || tool, "another VM's fence");
            }
        };
        match reply {
            Reply::Devices(entries) => entries.iter().for_each(check),
            Reply::Status(status) => check(&status.entry),
            _ => {}
        }
        let bytes = postcard::to_stdvec(reply).expect("it can be encoded");
        let fences = self.ledgers.iter().flat_map(Ledger::secrets);
        for secret in fences.chain(self.chains.secrets()) {
            let text = String::from(secret);
            let mut windows = bytes.windows(text.len());
            assert!(!windows.any(|bytes| bytes == text.as_bytes()), "a secret");
        }
    }

    /// The lender is killed at this point, and started again.
    pub fn crash(&mut self, input: &mut Input<'_>) {
        self.connections.clear();
        let clock = self.clock(input.u8());
        self.chains.restart(input.u8());
        (self.registry, self.devices) = start_lender(&self.file, clock, &self.chains);
        for (at, shown) in self.shown().into_iter().enumerate() {
            self.ledgers[at].check_restart(shown);
            self.ledgers[at].issued = clock;
        }
    }

    /// A generation that is larger than all issued ones.
    pub(super) fn clock(&self, ahead: u8) -> Generation {
        let largest = self.ledgers.iter().map(|ledger| ledger.issued).max();
        Generation(largest.map_or(0, |largest| largest.0) + 1 + u64::from(ahead))
    }

    /// The records, as an operator sees them.
    fn shown(&self) -> Vec<Shown> {
        let viewer = Viewer {
            identity: &identity(OPERATOR_HOST),
            vm: None,
        };
        let mut shown = DEVICES.map(|_| Shown::default());
        for entry in self.registry.entries(None, &viewer) {
            let at = index(&entry.id).expect("a device of the list");
            let fences = entry.fences.into_iter();
            shown[at] = Shown {
                holder: entry.borrowed_by.map(|by| (by.vm, by.generation)),
                fences: fences.map(|fence| (fence.vm.clone(), fence)).collect(),
                availability: Some(entry.availability),
            };
        }
        shown.into()
    }

    /// Checks the last step.
    pub fn check(&mut self) {
        let mut cause = self.cause.take();
        for (at, shown) in self.shown().into_iter().enumerate() {
            let cause = cause.take_if(|(of, _)| *of == at);
            if shown.holder.is_none() {
                let lease = self.devices[at].lease();
                assert!(lease.is_none(), "free while it may access memory");
                let revoking = shown.availability == Some(Availability::Revoking);
                assert!(!revoking, "a revocation without a lease");
            }
            if let Some(lease) = self.devices[at].lease() {
                let held = Some((lease.owner.vm().clone(), lease.generation));
                assert_eq!(shown.holder, held, "the record is of another lease");
            }
            let cause = cause.map_or(Cause::Nothing, |(_, cause)| cause);
            let is_handover = matches!(cause, Cause::Handover { .. });
            let issued = self.ledgers[at].issued;
            self.ledgers[at].check(at, shown, cause);
            // Not by a repeated one.
            if is_handover && self.ledgers[at].issued > issued {
                self.chains.end(at);
            }
        }
        assert!(cause.is_none());
        self.check_kept();
    }

    fn check_kept(&self) {
        for (at, device) in DEVICES.into_iter().enumerate() {
            // Not of a device that has been removed.
            if let Some(entry) = self.registry.borrowers_entry(&name(device)) {
                let expected = match entry.borrowed_by {
                    Some(_) => None,
                    None => self.chains.kept_for(at),
                };
                let kept = entry.kept.map(|kept| kept.vm);
                assert_eq!(kept.as_ref(), expected, "{device} is kept");
            }
        }
    }

    /// All hosts disconnect, the devices' DMA stops, and an operator ends the reservations: then
    /// each VM can borrow each device at the host that it was moved to.
    pub fn flush(&mut self) {
        for connection in &mut self.connections {
            connection.client = None;
        }
        for device in &mut self.devices {
            device.jammed = false;
        }
        for round in 0.. {
            assert!(round < 10_000, "no end to it");
            for at in 0..self.connections.len() {
                self.serve_connection(at);
                self.check();
            }
            for at in 0..DEVICES.len() {
                self.step(at);
                self.check();
            }
            let gone = |connection: &Connection| matches!(connection.end, End::Gone);
            let free = self.shown().iter().all(|shown| shown.holder.is_none());
            if free && self.connections.iter().all(gone) {
                break;
            }
        }
        for device in DEVICES {
            if self.registry.access(&name(device)).is_err() {
                let table = device.to_owned();
                let added = self.operate(OPERATOR_HOST, Request::AddDevice { table });
                added.expect("an operator adds devices");
                self.check();
            }
        }
        for (at, device) in DEVICES.into_iter().enumerate() {
            let id: DeviceId = name(device);
            for available in [false, true] {
                let set = self.registry.set_available(&id, available);
                set.expect("an operator sets the availability of devices");
            }
            let ended = self.registry.end_reservation(&id, None, true);
            ended.expect("an operator ends reservations");
            assert!(!self.shown()[at].fences.values().any(|fence| fence.reserved));
            for vm in VMS {
                let vm: VmName = name(vm);
                let held = self.ledgers[at].rightful(&vm);
                let owner = LeaseOwner::new(vm.clone(), Some(&identity(OPERATOR_HOST)));
                let granted = self.registry.grant(&id, &owner, held);
                let generation = match granted {
                    Ok(grant) => grant.generation(),
                    Err(error) => panic!("{vm} is locked out of {id}: {error}"),
                };
                self.registry
                    .release(&id, generation, Release::Over(Revocation::Released));
            }
        }
    }
}

fn grant<'a>(
    registry: &'a Registry,
    device: &'a DeviceId,
    owner: &LeaseOwner,
    fence: Option<HeldFence>,
    going: Option<Going>,
) -> Result<(Grant<'a>, Option<GrantedChain>), RemoteError> {
    match going {
        Some(going) => {
            let granted = registry.grant_medium(device, (owner, Transport::Network), fence, going);
            granted.map(|(grant, chain)| (grant, Some(chain)))
        }
        None => {
            let granted = registry.grant(device, owner, fence);
            granted.map(|grant| (grant, None))
        }
    }
}

fn cause(host: usize, request: &Request) -> Option<(usize, Cause)> {
    let (device, cause) = match request {
        Request::Handover {
            device,
            vm,
            supersedes,
            secret,
            ..
        } => {
            let (vm, supersedes, secret) = (vm.parse().ok()?, *supersedes, *secret);
            let cause = Cause::Handover {
                host,
                vm,
                supersedes,
                secret,
            };
            (device, cause)
        }
        Request::EndReservation { device, secret } => {
            let secret = *secret;
            (device, Cause::EndReservation { host, secret })
        }
        _ => return None,
    };
    Some((index(device)?, cause))
}

pub(super) fn index(device: &DeviceId) -> Option<usize> {
    DEVICES.iter().position(|id| *id == device.as_str())
}

pub(super) fn name<T: std::str::FromStr<Err: std::fmt::Debug>>(name: &str) -> T {
    name.parse().expect("a valid name")
}

/// A lender that has read its file. The generations that it issues are larger than `generation`.
fn start_lender(
    file: &std::path::Path,
    generation: Generation,
    chains: &Chains,
) -> (Registry, Vec<Device>) {
    let fences = FenceBook::load(Some(file.to_owned())).expect("its own file");
    let registry = Registry::new(fences).keeping(chains.keep);
    let add = |at| {
        let device = add_device(&registry, at, generation, chains.media[at]);
        device.expect("it has another id")
    };
    let devices = (0..DEVICES.len()).map(add).collect();
    (registry, devices)
}
