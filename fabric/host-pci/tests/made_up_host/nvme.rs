//! Virtual functions of NVMe controllers.

use farside_host_pci::{AdminCommand, Force, PciError};

use crate::host::{MadeUpHost, bdf};

const PF: &str = "0000:00:05.0";
const DIR: &str = "sys/bus/pci/devices/0000:00:05.0";
const INVALID_FIELD: u16 = 0x4002;

/// A primary controller with the identifier 0, and secondary ones for its virtual functions.
pub struct MadeUpController {
    has_virtualization: bool,
    /// Flexible queues and interrupts that it has itself.
    own: [u16; 2],
    /// Those in all.
    total: [u16; 2],
    secondaries: Vec<Secondary>,
    /// The most of each that it gives a secondary controller.
    most: u16,
    /// Whether each list is full, of the identifier that was asked for.
    lists_without_end: bool,
    lists: u32,
    /// The number of Virtualization Management commands until one fails.
    fails_after: usize,
    /// Those that succeeded: action, controller, number.
    managed: Vec<(u32, u16, u32)>,
}

#[derive(Clone, Default)]
struct Secondary {
    online: bool,
    assigned: [u16; 2],
}

impl MadeUpController {
    fn new(secondaries: usize) -> Self {
        Self {
            has_virtualization: true,
            own: [0; 2],
            total: [300, 300],
            secondaries: vec![Secondary::default(); secondaries],
            most: 4,
            lists_without_end: false,
            lists: 0,
            fails_after: usize::MAX,
            managed: Vec::new(),
        }
    }

    pub fn answer(&mut self, command: AdminCommand, data: &mut [u8]) -> u16 {
        let id = (command.cdw10 >> 16) as u16;
        let low = command.cdw10 & 0xffff;
        match (command.opcode, low) {
            (0x06, 0x01) => data[256] = u8::from(self.has_virtualization) << 7,
            (0x06, 0x14) => {
                data[4] = 0b11;
                for n in 0..2 {
                    let assigned = self.secondaries.iter().map(|it| it.assigned[n]).sum();
                    let at = 32 * (n + 1);
                    for (at, number) in [
                        (at, self.total[n]),
                        (at + 4, assigned),
                        (at + 8, self.own[n]),
                        (at + 12, self.most),
                        (at + 14, 1),
                    ] {
                        data[at..at + 2].copy_from_slice(&number.to_le_bytes());
                    }
                }
            }
            (0x06, 0x15) if self.lists_without_end => {
                self.lists += 1;
                data[0] = 127;
                for entry in data[32..].chunks_mut(32) {
                    entry[..2].copy_from_slice(&id.to_le_bytes());
                }
            }
            (0x06, 0x15) => {
                let all = (1u16..).zip(&self.secondaries);
                let listed: Vec<_> = all.filter(|(n, _)| *n >= id).take(127).collect();
                data[0] = listed.len() as u8;
                for ((n, it), entry) in listed.into_iter().zip(data[32..].chunks_mut(32)) {
                    entry[4] = u8::from(it.online);
                    for (at, number) in [(0, n), (8, n), (10, it.assigned[0]), (12, it.assigned[1])]
                    {
                        entry[at..at + 2].copy_from_slice(&number.to_le_bytes());
                    }
                }
            }
            (0x1c, _) => return self.manage(low, id, command.cdw11),
            _ => panic!("{command:x?}"),
        }
        0
    }

    fn manage(&mut self, action: u32, id: u16, count: u32) -> u16 {
        let secondary = &mut self.secondaries[usize::from(id) - 1];
        let is_ready =
            !secondary.online && secondary.assigned[0] >= 2 && secondary.assigned[1] >= 1;
        match action {
            7 => *secondary = Secondary::default(),
            _ if self.managed.len() == self.fails_after => return INVALID_FIELD,
            8 => secondary.assigned[0] = count as u16,
            0x108 => secondary.assigned[1] = count as u16,
            9 if is_ready => secondary.online = true,
            _ => return INVALID_FIELD,
        }
        self.managed.push((action, id, count));
        0
    }

    fn is_online(&self, id: usize) -> bool {
        self.secondaries[id - 1].online
    }
}

fn host(controller: MadeUpController) -> MadeUpHost {
    let host = MadeUpHost::new();
    host.function(PF, [0x1b36, 0x0010], 0x01_0802, Some("nvme"));
    let total = controller.secondaries.len();
    host.file(&format!("{DIR}/sriov_totalvfs"), &format!("{total}\n"));
    host.file(&format!("{DIR}/sriov_numvfs"), "0\n");
    host.file(&format!("{DIR}/nvme/nvme0/cntlid"), "0\n");
    host.nvme(|nvme| *nvme = Some(controller));
    host
}

fn with<T>(host: &MadeUpHost, look: impl FnOnce(&mut MadeUpController) -> T) -> T {
    host.nvme(|nvme| look(nvme.as_mut().unwrap()))
}

#[test]
fn virtual_functions_get_resources_and_are_set_online() {
    let host = host(MadeUpController::new(8));
    let created = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap();
    for vf in created.vfs() {
        host.pci().check_vf_online(vf).unwrap();
    }
    let expected = [
        (8, 1, 4),
        (8, 2, 4),
        (0x108, 1, 4),
        (0x108, 2, 4),
        (9, 1, 0),
        (9, 2, 0),
    ];
    with(&host, |it| assert_eq!(it.managed, expected));
    created.leave();
    // Those that exist are not changed.
    let kept = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap();
    assert!(!kept.were_created());
    with(&host, |it| assert_eq!(it.managed, expected));
}

#[test]
fn more_than_one_list_of_secondary_controllers_is_read() {
    let host = host(MadeUpController::new(128));
    let created = host.pci().create_vfs(&bdf(PF), 128, Force::No).unwrap();
    with(&host, |it| assert!((1..=128).all(|n| it.is_online(n))));
    drop(created);
    with(&host, |it| it.secondaries.truncate(127));
    let error = host.pci().create_vfs(&bdf(PF), 128, Force::No).unwrap_err();
    let text = error.to_string();
    for word in [PF, "lists 127", "virtual function 128"] {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
    assert_eq!(host.read(&format!("{DIR}/sriov_numvfs")), "0");
}

#[test]
fn too_few_resources_are_told_with_the_remedy_and_nothing_is_changed() {
    let mut controller = MadeUpController::new(4);
    controller.total = [12, 8];
    controller.own = [9, 0];
    let host = host(controller);
    let error = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap_err();
    let text = error.to_string();
    for word in [
        PF,
        "need 4 flexible queue",
        "3 of 12",
        "release 1 of the 9",
        "dev/nvme0 -c 0 -r 0 -a 1 -n 8;",
        "0000:00:05.0/reset",
    ] {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
    with(&host, |it| {
        assert_eq!(it.managed, []);
        it.own = [0, 0];
        it.total = [12, 1];
    });
    let error = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("need 2 flexible interrupt") && !text.contains("release"),
        "{text}"
    );
    assert_eq!(host.read(&format!("{DIR}/sriov_numvfs")), "0");
}

#[test]
fn a_maximum_for_each_function_is_named() {
    let mut controller = MadeUpController::new(4);
    controller.most = 1;
    let host = host(controller);
    let error = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, PciError::NvmeMaximum { .. }), "{text}");
    for word in [PF, "at most 1 flexible queue", "fewer than 2"] {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}

#[test]
fn a_controller_that_lists_without_end_is_not_asked_for_ever() {
    let mut controller = MadeUpController::new(4);
    controller.lists_without_end = true;
    let host = host(controller);
    let error = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap_err();
    assert!(matches!(error, PciError::NvmeNoSecondary { .. }), "{error}");
    with(&host, |it| assert_eq!(it.lists, 1));
}

#[test]
fn if_one_cannot_be_set_online_none_is() {
    for fails_after in 0..6 {
        let host = host(MadeUpController::new(4));
        with(&host, |it| it.fails_after = fails_after);
        let error = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap_err();
        assert!(matches!(error, PciError::NvmeCommand { .. }), "{error}");
        with(&host, |it| {
            assert!(
                it.secondaries
                    .iter()
                    .all(|it| !it.online && it.assigned == [0, 0])
            );
        });
        assert_eq!(host.read(&format!("{DIR}/sriov_numvfs")), "0");
    }
}

#[test]
fn one_that_is_offline_is_refused() {
    let host = host(MadeUpController::new(4));
    with(&host, |it| it.has_virtualization = false);
    let created = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap();
    // Others are online whenever they exist.
    host.pci().check_vf_online(&created.vfs()[1]).unwrap();
    with(&host, |it| it.has_virtualization = true);
    let error = host.pci().check_vf_online(&created.vfs()[1]).unwrap_err();
    let text = error.to_string();
    for word in ["0000:00:10.1", "controller 2 of", PF, "--vfs", "-c 2"] {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
    host.pci().check_vf_online(&bdf(PF)).unwrap();
}

#[test]
fn what_was_assigned_by_hand_stays_if_another_cannot_be_set_online() {
    // Both assignments of the second one, and each of the two that is set online.
    for fails_after in 0..4 {
        let host = host(MadeUpController::new(4));
        with(&host, |it| {
            it.secondaries[0].assigned = [3, 2];
            it.fails_after = fails_after;
        });
        host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap_err();
        with(&host, |it| {
            let first = &it.secondaries[0];
            assert_eq!((first.online, first.assigned), (false, [3, 2]));
            assert!(!it.is_online(2));
        });
    }
}

#[test]
fn without_the_right_functions_stay_as_they_are() {
    let host = host(MadeUpController::new(4));
    host.nvme(|nvme| *nvme = None);
    let created = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap();
    host.pci().check_vf_online(&created.vfs()[0]).unwrap();
    created.leave();
    let kept = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap();
    assert!(!kept.were_created());
    // With it, those that were created by others are set online.
    host.nvme(|nvme| *nvme = Some(MadeUpController::new(4)));
    host.pci().check_vf_online(&kept.vfs()[0]).unwrap_err();
    let _kept = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap();
    with(&host, |it| assert!(it.is_online(1) && it.is_online(2)));
}
