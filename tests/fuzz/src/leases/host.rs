//! Hosts: their identities, and what they know.

use std::{collections::BTreeMap, net::Ipv4Addr};

use farside_daemon::{DeviceId, VmName};
use farside_lender_protocol::{
    Envelope, Generation, HeldFence, Identity, Request, Secret, Transport,
};

use super::world::{World, name};
use crate::{access::Borrower, input::Input};

/// The uid of the lender.
pub const OPERATOR: u32 = 900;
const ALICE: u32 = 4_242_001;
const BOB: u32 = 4_242_002;

pub const DEVICES: [&str; 2] = ["dev0", "dev1"];
pub const VMS: [&str; 2] = ["vm0", "vm1"];
pub const HOSTS: usize = 5;
pub const OPERATOR_HOST: usize = 3;

/// The name in the certificate of host 1.
const RACK: &str = "rack1-b";

/// A host without TLS, one with, and three users of the lender's host; no rule names the last.
pub fn identity(host: usize) -> Identity {
    let address = (Ipv4Addr::new(10, 0, 0, 1), 4000).into();
    match host {
        0 => Identity::Network { address },
        1 => Identity::Host {
            name: RACK.into(),
            address,
        },
        2 => user(ALICE),
        OPERATOR_HOST => user(OPERATOR),
        _ => user(BOB),
    }
}

fn user(uid: u32) -> Identity {
    Identity::User { uid, pid: 7 }
}

pub fn is_operator(host: usize) -> bool {
    host == OPERATOR_HOST
}

/// The rules of a device.
pub fn borrowers(device: usize) -> Vec<Borrower> {
    let vm = (device == 1).then(|| VMS[0].parse().expect("a valid name"));
    vec![
        Borrower::User {
            uid: ALICE,
            vm,
            claim: false,
        },
        Borrower::Host {
            name: RACK.into(),
            vm: None,
            claim: false,
        },
        Borrower::Network,
    ]
}

/// Whether a host may borrow a device for a VM, or for some VM: these rules, written out.
pub fn may(host: usize, device: usize, vm: Option<&VmName>) -> bool {
    match host {
        0 | 1 | OPERATOR_HOST => true,
        2 => device == 0 || vm.is_none_or(|vm| vm == VMS[0]),
        _ => false,
    }
}

/// A migration as its tool's journal has it: the same request is sent until it is answered.
#[derive(Clone)]
pub struct Migration {
    pub device: usize,
    pub vm: usize,
    pub id: String,
    pub supersedes: Option<HeldFence>,
    pub secret: Secret,
    pub destination: usize,
    pub fence: Option<Generation>,
}

/// A host's files, and the requests that it has sent.
#[derive(Default)]
pub struct Host {
    /// Its fences, by VM and device.
    pub held: BTreeMap<(usize, usize), HeldFence>,
    pub migrations: Vec<Migration>,
    pub sent: Vec<Envelope>,
}

impl World {
    fn new_secret(&mut self) -> Secret {
        self.secrets += 1;
        let text = format!("{:032x}", u128::from(self.secrets) << 64 | 0x5ec2_e75e_c2e7);
        text.try_into().expect("32 digits")
    }

    /// A fence that the host has, or makes up.
    fn fence(&mut self, host: usize, vm: usize, device: usize, choice: u8) -> Option<HeldFence> {
        let held = self.hosts[host].held.get(&(vm, device)).copied();
        match choice % 8 {
            0 => None,
            1 => Some(HeldFence {
                generation: self.ledgers[device].issued,
                secret: Some(self.new_secret()),
            }),
            // As the lists show it.
            2 => self.ledgers[device]
                .rightful(&name(VMS[vm]))
                .map(|held| HeldFence {
                    secret: None,
                    ..held
                }),
            3 => held.map(|held| HeldFence {
                generation: Generation(held.generation.0.wrapping_add(1)),
                ..held
            }),
            _ => held,
        }
    }

    /// A host sends a request.
    pub fn request(&mut self, input: &mut Input<'_>) {
        let Some(at) = self.pick(input) else { return };
        let host = self.connections[at].host;
        let (kind, choice) = (input.u8(), input.u8());
        let device = usize::from(choice & 1);
        let vm = usize::from(choice >> 1 & 1);
        let id: DeviceId = name(DEVICES[device]);
        let mut migration = None;
        let request = match kind % 16 {
            0..=6 => {
                let claimed = self.connections[at].vm.as_deref();
                let vm = VMS.iter().position(|vm| claimed == Some(vm)).unwrap_or(vm);
                let fence = self.fence(host, vm, device, choice >> 5);
                match (kind % 16, choice >> 2 & 7) {
                    // Refused, for users of the lender's host.
                    (0, _) => self.medium_request(device, VMS[vm], fence, input.u8()),
                    (1..=4, _) if identity(host).is_network() => {
                        self.medium_request(device, VMS[vm], fence, input.u8())
                    }
                    (_, local) => Request::Borrow {
                        device: id,
                        transport: match local {
                            0 => Transport::SharedMemory,
                            _ => Transport::Ntb,
                        },
                        fence,
                    },
                }
            }
            7..=8 => {
                let known = self.hosts[host].migrations.len();
                let index = match usize::from(choice >> 5) {
                    again if again < known.min(4) => again,
                    _ if known >= 16 => known - 1,
                    _ => {
                        let supersedes = self.fence(host, vm, device, input.u8());
                        let new = Migration {
                            device,
                            vm,
                            id: format!("m{host}-{known}"),
                            supersedes,
                            secret: self.new_secret(),
                            destination: usize::from(choice >> 2) % HOSTS,
                            fence: None,
                        };
                        self.hosts[host].migrations.push(new);
                        known
                    }
                };
                migration = Some(index);
                let chosen = &self.hosts[host].migrations[index];
                Request::Handover {
                    device: name(DEVICES[chosen.device]),
                    vm: VMS[chosen.vm].to_owned(),
                    migration: chosen.id.clone(),
                    supersedes: chosen.supersedes,
                    secret: chosen.secret,
                }
            }
            9..=10 => Request::EndReservation {
                device: id,
                secret: self
                    .fence(host, vm, device, choice >> 2)
                    .and_then(|held| held.secret),
            },
            11 => Request::Devices { after: None },
            12 => Request::Status { device: id },
            13 | 14 => match choice >> 2 & 7 {
                0 => Request::RemoveDevice { device: id },
                1 | 2 => Request::AddDevice {
                    table: DEVICES[device].to_owned(),
                },
                available @ (3 | 4) => Request::SetAvailable {
                    device: id,
                    available: available == 4,
                },
                5 => Request::Revoke {
                    device: id,
                    limit_ms: u64::from(choice),
                },
                6 => Request::Check {
                    device: id,
                    transport: Transport::Ntb,
                    ram: Vec::new(),
                },
                _ => Request::Describe { device: id },
            },
            _ => Request::Return,
        };
        self.post(at, request, migration);
    }

    /// A host sends bytes that may be a request.
    pub fn raw_request(&mut self, input: &mut Input<'_>) {
        let Some(at) = self.pick(input) else { return };
        let len = input.u8();
        if let Ok(envelope) = postcard::from_bytes(input.bytes(len.into())) {
            self.post_envelope(at, envelope, None);
        }
    }

    /// A host sends a request again, maybe over another connection.
    pub fn repeat(&mut self, input: &mut Input<'_>) {
        let Some(at) = self.pick(input) else { return };
        let sent = &self.hosts[self.connections[at].host].sent;
        let choice = usize::from(input.u8()).checked_rem(sent.len());
        if let Some(envelope) = choice.map(|choice| sent[choice].clone()) {
            self.post_envelope(at, envelope, None);
        }
    }
}
