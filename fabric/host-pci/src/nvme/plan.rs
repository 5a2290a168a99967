//! Which flexible resources the secondary controllers get, from what the primary controller reports; pure.
//!
//! Source: NVMe 1.3, 5.15 (Identify), 8.5 (Virtualization Enhancements).

/// Length of the data of Identify.
pub(crate) const IDENTIFY: usize = 4096;
/// Entries of a secondary controller list.
pub(crate) const MAX_ENTRIES: usize = 127;
/// Length of the list's header and of each entry.
const ENTRY: usize = 32;

/// A type of resources that the primary controller distributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resource {
    /// Pairs of submission and completion queues.
    Queue,
    /// Interrupt vectors.
    Interrupt,
}

impl Resource {
    pub(crate) const ALL: [Self; 2] = [Self::Queue, Self::Interrupt];

    /// Its value in the Virtualization Management command.
    pub(crate) fn number(self) -> u32 {
        self as u32
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Interrupt => "interrupt",
        }
    }

    /// The least with which a controller goes online: the admin queue and an I/O queue, and a vector.
    pub(crate) fn least(self) -> u16 {
        match self {
            Self::Queue => 2,
            Self::Interrupt => 1,
        }
    }
}

/// Numbers of a type of resources.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Flexible {
    pub(crate) total: u32,
    /// Assigned to secondary controllers.
    pub(crate) secondary: u32,
    /// Allocated to the primary controller.
    pub(crate) primary: u16,
    /// The most for a secondary controller.
    pub(crate) most: u16,
    granularity: u16,
}

/// Primary controller capabilities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// The primary controller's identifier.
    pub(crate) id: u16,
    /// By [`Resource`]; `None` for a type that has no flexible resources.
    flexible: [Option<Flexible>; 2],
}

/// An entry of the secondary controller list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Secondary {
    pub(crate) id: u16,
    pub(crate) online: bool,
    /// The number of its virtual function, from 1; 0 for a controller that is none.
    pub(crate) vf: u16,
    /// Assigned resources, by [`Resource`].
    assigned: [u16; 2],
}

/// `count` resources for the secondary controller `id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Assignment {
    pub(crate) id: u16,
    pub(crate) resource: Resource,
    pub(crate) count: u16,
}

/// Too few resources.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) resource: Resource,
    pub(crate) flexible: Flexible,
    pub(crate) needed: u32,
    pub(crate) free: u32,
}

impl Capabilities {
    pub(crate) fn parse(data: &[u8; IDENTIFY]) -> Self {
        let supported = data[4];
        let flexible = |resource: Resource| {
            let at = 32 * (1 + resource as usize);
            (supported & 1 << resource.number() != 0).then(|| Flexible {
                total: u32_at(data, at),
                secondary: u32_at(data, at + 4),
                primary: u16_at(data, at + 8),
                most: u16_at(data, at + 12),
                granularity: u16_at(data, at + 14),
            })
        };
        Self {
            id: u16_at(data, 0),
            flexible: Resource::ALL.map(flexible),
        }
    }
}

impl Secondary {
    /// The entries of a list.
    pub(crate) fn parse(data: &[u8; IDENTIFY]) -> Vec<Self> {
        let entries = data.chunks_exact(ENTRY).skip(1).take(data[0].into());
        let entry = |entry: &[u8]| Self {
            id: u16_at(entry, 0),
            online: entry[4] & 1 != 0,
            vf: u16_at(entry, 8),
            assigned: [u16_at(entry, 10), u16_at(entry, 12)],
        };
        entries.map(entry).collect()
    }

    pub(crate) fn assigned(&self, resource: Resource) -> u16 {
        self.assigned[resource as usize]
    }
}

/// What the `secondaries`, which are offline, need to go online. Those that were assigned enough keep
/// it; the others get equal parts of what is free.
pub(crate) fn plan(
    capabilities: &Capabilities,
    secondaries: &[Secondary],
) -> Result<Vec<Assignment>, Shortage> {
    let mut plan = Vec::new();
    for resource in Resource::ALL {
        let Some(flexible) = capabilities.flexible[resource as usize] else {
            continue;
        };
        let assigned = |of: &Secondary| of.assigned(resource);
        let least = resource.least();
        let in_need = secondaries.iter().filter(|of| assigned(of) < least);
        let in_need: Vec<&Secondary> = in_need.collect();
        let Some(count) = u32::try_from(in_need.len()).ok().filter(|&n| n > 0) else {
            continue;
        };
        let own: u32 = in_need.iter().map(|of| u32::from(assigned(of))).sum();
        let taken =
            (flexible.secondary.saturating_sub(own)).saturating_add(flexible.primary.into());
        let free = flexible.total.saturating_sub(taken);
        let part = (free / count).min(flexible.most.into());
        let rounded = part - part % u32::from(flexible.granularity.max(1));
        // Granularity is a preference.
        let part = if rounded < least.into() {
            part
        } else {
            rounded
        };
        let Some(part) = u16::try_from(part).ok().filter(|&part| part >= least) else {
            return Err(Shortage {
                resource,
                flexible,
                needed: count * u32::from(least),
                free,
            });
        };
        plan.extend(in_need.iter().map(|of| Assignment {
            id: of.id,
            resource,
            count: part,
        }));
    }
    Ok(plan)
}

fn u16_at(data: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([data[at], data[at + 1]])
}

fn u32_at(data: &[u8], at: usize) -> u32 {
    u32::from(u16_at(data, at)) | u32::from(u16_at(data, at + 2)) << 16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A controller with up to 3 queues and 2 interrupts for each secondary one.
    fn capabilities(queues: [u32; 3], interrupts: [u32; 3]) -> Capabilities {
        let mut data = [0; IDENTIFY];
        data[4] = 0b11;
        for (at, most, [total, secondary, primary]) in [(32, 3, queues), (64, 2, interrupts)] {
            data[at..at + 4].copy_from_slice(&total.to_le_bytes());
            data[at + 4..at + 8].copy_from_slice(&secondary.to_le_bytes());
            data[at + 8..at + 10].copy_from_slice(&(primary as u16).to_le_bytes());
            data[at + 12] = most;
            data[at + 14] = 1;
        }
        Capabilities::parse(&data)
    }

    fn offline(id: u16, queues: u16, interrupts: u16) -> Secondary {
        Secondary {
            id,
            online: false,
            vf: id,
            assigned: [queues, interrupts],
        }
    }

    /// Controller, queues and interrupts.
    fn assigned(plan: &[Assignment], resource: Resource) -> Vec<(u16, u16)> {
        let of = plan.iter().filter(|it| it.resource == resource);
        of.map(|it| (it.id, it.count)).collect()
    }

    #[test]
    fn lists_are_parsed() {
        let mut data = [0; IDENTIFY];
        data[0] = 2;
        data[32..46].copy_from_slice(&[7, 0, 1, 0, 1, 0, 0, 0, 2, 0, 3, 0, 4, 0]);
        let list = Secondary::parse(&data);
        assert_eq!(list.len(), 2);
        let first = Secondary {
            id: 7,
            online: true,
            vf: 2,
            assigned: [3, 4],
        };
        assert_eq!(list[0], first);
        data[0] = u8::MAX;
        assert_eq!(Secondary::parse(&data).len(), MAX_ENTRIES);
    }

    #[test]
    fn each_gets_an_equal_part_up_to_the_limit() {
        let two = [offline(1, 0, 0), offline(2, 0, 0)];
        let wide = plan(&capabilities([12, 0, 0], [8, 0, 0]), &two).unwrap();
        assert_eq!(assigned(&wide, Resource::Queue), [(1, 3), (2, 3)]);
        assert_eq!(assigned(&wide, Resource::Interrupt), [(1, 2), (2, 2)]);
        let narrow = plan(&capabilities([5, 0, 0], [4, 1, 0]), &two).unwrap();
        assert_eq!(assigned(&narrow, Resource::Queue), [(1, 2), (2, 2)]);
        assert_eq!(assigned(&narrow, Resource::Interrupt), [(1, 1), (2, 1)]);
    }

    #[test]
    fn those_with_enough_keep_it() {
        let some = [offline(1, 2, 1), offline(2, 1, 2)];
        let plan = plan(&capabilities([4, 3, 0], [3, 3, 0]), &some).unwrap();
        assert_eq!(assigned(&plan, Resource::Queue), [(2, 2)]);
        assert_eq!(assigned(&plan, Resource::Interrupt), []);
    }

    #[test]
    fn a_granularity_is_kept_if_there_is_enough() {
        let mut capabilities = capabilities([12, 0, 0], [8, 0, 0]);
        for (granularity, expected) in [(2, 2), (4, 3)] {
            capabilities.flexible[0].as_mut().unwrap().granularity = granularity;
            let plan = plan(&capabilities, &[offline(1, 0, 0)]).unwrap();
            assert_eq!(assigned(&plan, Resource::Queue), [(1, expected)]);
        }
    }

    #[test]
    fn what_is_not_flexible_is_not_assigned() {
        let mut capabilities = capabilities([12, 0, 0], [0, 0, 0]);
        capabilities.flexible[Resource::Interrupt as usize] = None;
        let plan = plan(&capabilities, &[offline(1, 0, 0)]).unwrap();
        assert_eq!(assigned(&plan, Resource::Queue), [(1, 3)]);
        assert_eq!(plan.len(), 1);
    }

    #[test]
    fn too_few_are_told() {
        let two = [offline(1, 0, 0), offline(2, 0, 0)];
        let short = plan(&capabilities([12, 0, 9], [8, 0, 0]), &two).unwrap_err();
        assert_eq!(
            (short.resource, short.needed, short.free),
            (Resource::Queue, 4, 3)
        );
        let short = plan(&capabilities([12, 0, 0], [8, 9, 8]), &two).unwrap_err();
        assert_eq!(
            (short.resource, short.needed, short.free),
            (Resource::Interrupt, 2, 0)
        );
    }
}
