//! A made-up host.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use farside_host_pci::{AdminCommand, HostPci, Kernel};
use farside_pci::Bdf;
use rustix::io::Errno;
use tempfile::TempDir;

use crate::nvme::MadeUpController;

/// A host with an IOMMU, the driver vfio-pci, and the functions that a test adds.
pub struct MadeUpHost {
    dir: TempDir,
    kernel: Arc<MadeUpKernel>,
}

/// The kernel's reactions to writes to its files.
pub struct MadeUpKernel {
    root: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    writes: Vec<(String, String)>,
    /// Each function's native driver.
    own_drivers: BTreeMap<String, String>,
    /// Block devices that are open exclusively.
    claimed: BTreeSet<String>,
    /// Writes to these files fail.
    refuse: BTreeMap<String, Errno>,
    /// Drivers that refuse to bind.
    unwilling: BTreeSet<String>,
    /// Maximum number of virtual functions.
    vf_limit: Option<u32>,
    /// The NVMe controller that has a character device.
    nvme: Option<MadeUpController>,
}

pub fn bdf(text: &str) -> Bdf {
    text.parse().unwrap()
}

impl MadeUpHost {
    pub fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let kernel = Arc::new(MadeUpKernel {
            root: dir.path().to_owned(),
            state: Mutex::default(),
        });
        let host = Self { dir, kernel };
        host.file("sys/bus/pci/drivers_probe", "");
        host.driver("vfio-pci");
        host.file("sys/class/iommu/dmar0/name", "");
        host.file("sys/kernel/iommu_groups/0/reserved_regions", "");
        host.file(
            "proc/swaps",
            "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n",
        );
        host.file(
            "proc/self/mountinfo",
            "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n",
        );
        host
    }

    pub fn pci(&self) -> HostPci {
        HostPci::with_kernel(self.dir.path(), self.kernel.clone())
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    pub fn file(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub fn append(&self, path: &str, text: &str) {
        let old = fs::read_to_string(self.path(path)).unwrap();
        self.file(path, &(old + text));
    }

    pub fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path(path))
            .unwrap()
            .trim()
            .to_owned()
    }

    pub fn remove(&self, path: &str) {
        let path = self.path(path);
        if path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }

    pub fn link(&self, path: &str, target: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(self.path(target), path).unwrap();
    }

    pub fn driver(&self, name: &str) {
        for file in ["bind", "unbind"] {
            self.file(&format!("sys/bus/pci/drivers/{name}/{file}"), "");
        }
    }

    /// An endpoint with ids, class and driver, whose IOMMU group has the number of its
    /// slot.
    pub fn function(&self, address: &str, ids: [u16; 2], class: u32, driver: Option<&str>) {
        self.function_in("sys/devices/pci0000:00", address, ids, class, driver);
    }

    pub fn function_in(
        &self,
        parent: &str,
        address: &str,
        ids: [u16; 2],
        class: u32,
        driver: Option<&str>,
    ) {
        let dir = format!("{parent}/{address}");
        self.file(&format!("{dir}/vendor"), &format!("{:#06x}\n", ids[0]));
        self.file(&format!("{dir}/device"), &format!("{:#06x}\n", ids[1]));
        self.file(&format!("{dir}/class"), &format!("{class:#08x}\n"));
        self.file(&format!("{dir}/driver_override"), "(null)\n");
        self.file(&format!("{dir}/dma_mask_bits"), "64\n");
        self.header_type(&dir, 0x80);
        self.link(&format!("sys/bus/pci/devices/{address}"), &dir);
        self.group(address, u32::from(bdf(address).device()));
        if let Some(driver) = driver {
            self.driver(driver);
            self.kernel.bind(address, driver).unwrap();
            let mut state = self.kernel.state.lock().unwrap();
            state
                .own_drivers
                .insert(address.to_owned(), driver.to_owned());
        }
    }

    pub fn header_type(&self, dir: &str, header: u8) {
        let mut config = vec![0u8; 256];
        config[0x0e] = header;
        fs::create_dir_all(self.path(dir)).unwrap();
        fs::write(self.path(dir).join("config"), config).unwrap();
    }

    /// Moves a function to an IOMMU group.
    pub fn group(&self, address: &str, group: u32) {
        let link = format!("sys/bus/pci/devices/{address}/iommu_group");
        if let Ok(old) = fs::canonicalize(self.path(&link)) {
            fs::remove_file(old.join("devices").join(address)).unwrap();
            self.remove(&link);
        }
        let dir = format!("sys/kernel/iommu_groups/{group}");
        self.link(&link, &dir);
        self.link(
            &format!("{dir}/devices/{address}"),
            &format!("sys/bus/pci/devices/{address}"),
        );
    }

    /// A block device or interface below a function.
    pub fn class_device(&self, class: &str, place: &str, name: &str) {
        self.file(&format!("{place}/{name}/uevent"), "");
        self.link(
            &format!("sys/class/{class}/{name}"),
            &format!("{place}/{name}"),
        );
    }

    pub fn claim(&self, block: &str) {
        let mut state = self.kernel.state.lock().unwrap();
        state.claimed.insert(block.to_owned());
    }

    pub fn refuse_writes(&self, path: &str, errno: Errno) {
        let mut state = self.kernel.state.lock().unwrap();
        state.refuse.insert(path.to_owned(), errno);
    }

    pub fn make_unwilling(&self, driver: &str) {
        let mut state = self.kernel.state.lock().unwrap();
        state.unwilling.insert(driver.to_owned());
    }

    pub fn limit_vfs(&self, limit: u32) {
        self.kernel.state.lock().unwrap().vf_limit = Some(limit);
    }

    /// Has `use_it` look at the NVMe controller `nvme0`, or change it.
    pub fn nvme<T>(&self, use_it: impl FnOnce(&mut Option<MadeUpController>) -> T) -> T {
        use_it(&mut self.kernel.state.lock().unwrap().nvme)
    }

    /// The writes since the last call, as `path <- text`.
    pub fn writes(&self) -> Vec<String> {
        let writes = std::mem::take(&mut self.kernel.state.lock().unwrap().writes);
        writes
            .into_iter()
            .map(|(path, text)| format!("{path} <- {}", text.escape_default()))
            .collect()
    }

    pub fn driver_of(&self, address: &str) -> Option<String> {
        self.kernel.driver_of(address)
    }
}

impl MadeUpKernel {
    fn device(&self, address: &str) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(address)
    }

    fn driver_of(&self, address: &str) -> Option<String> {
        let driver = fs::read_link(self.device(address).join("driver")).ok()?;
        Some(driver.file_name()?.to_str()?.to_owned())
    }

    fn bind(&self, address: &str, driver: &str) -> io::Result<()> {
        let target = self.root.join("sys/bus/pci/drivers").join(driver);
        if !target.exists() || self.state.lock().unwrap().unwilling.contains(driver) {
            return Ok(());
        }
        symlink(target, self.device(address).join("driver"))
    }

    fn probe(&self, address: &str) -> io::Result<()> {
        if !self.device(address).exists() {
            return Err(Errno::NODEV.into());
        }
        if self.driver_of(address).is_some() {
            return Ok(());
        }
        let forced = fs::read_to_string(self.device(address).join("driver_override"))?;
        let own = self.state.lock().unwrap().own_drivers.get(address).cloned();
        match (forced.trim(), own) {
            ("(null)", Some(own)) => self.bind(address, &own),
            ("(null)", None) => Ok(()),
            (forced, _) => self.bind(address, forced),
        }
    }

    fn unbind(&self, driver: &Path, address: &str) -> io::Result<()> {
        let driver = fs::canonicalize(driver)?;
        let name = driver.file_name().unwrap().to_str().unwrap();
        if self.driver_of(address).as_deref() != Some(name) {
            return Err(Errno::NODEV.into());
        }
        fs::remove_file(self.device(address).join("driver"))
    }

    fn set_vfs(&self, pf: &Path, text: &str) -> io::Result<()> {
        let wanted: u32 = text.trim().parse().map_err(|_| Errno::INVAL)?;
        let now = fs::read_to_string(pf.join("sriov_numvfs"))?;
        let now: u32 = now.trim().parse().unwrap();
        if wanted > 0 && now > 0 {
            return Err(Errno::BUSY.into());
        }
        let pf_address = pf.file_name().unwrap().to_str().unwrap();
        let parent = pf.parent().unwrap();
        for index in 0..now {
            let address = vf_address(pf_address, index);
            fs::remove_file(pf.join(format!("virtfn{index}")))?;
            fs::remove_file(self.device(&address))?;
            fs::remove_dir_all(parent.join(&address))?;
        }
        let limit = self.state.lock().unwrap().vf_limit.unwrap_or(u32::MAX);
        for index in 0..wanted.min(limit) {
            let address = vf_address(pf_address, index);
            let dir = parent.join(&address);
            fs::create_dir_all(&dir)?;
            for (name, value) in [
                ("vendor", "0x8086\n"),
                ("device", "0x10ca\n"),
                ("class", "0x020000\n"),
                ("driver_override", "(null)\n"),
            ] {
                fs::write(dir.join(name), value)?;
            }
            symlink(pf, dir.join("physfn"))?;
            symlink(&dir, pf.join(format!("virtfn{index}")))?;
            symlink(&dir, self.device(&address))?;
        }
        fs::write(pf.join("sriov_numvfs"), format!("{wanted}\n"))
    }
}

/// The kernel's routing IDs depend on the device; these are consecutive, on bus + 1.
fn vf_address(pf: &str, index: u32) -> String {
    let pf = bdf(pf);
    let (device, function) = (0x10 + index / 8, index % 8);
    Bdf::new(
        pf.domain(),
        pf.bus(),
        u8::try_from(device).unwrap(),
        u8::try_from(function).unwrap(),
    )
    .unwrap()
    .to_string()
}

impl Kernel for MadeUpKernel {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let relative = path
            .strip_prefix(&self.root)
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned();
        {
            let mut state = self.state.lock().unwrap();
            state.writes.push((relative.clone(), text.to_owned()));
            if let Some(errno) = state.refuse.get(&relative) {
                return Err((*errno).into());
            }
        }
        if !path.exists() {
            return Err(Errno::NOENT.into());
        }
        let parent = path.parent().unwrap();
        match path.file_name().unwrap().to_str().unwrap() {
            "drivers_probe" => self.probe(text),
            "unbind" => self.unbind(parent, text),
            "bind" => {
                let driver = parent.file_name().unwrap().to_str().unwrap();
                self.bind(text, driver)
            }
            "driver_override" if text == "\n" => fs::write(path, "(null)\n"),
            "sriov_numvfs" => self.set_vfs(&fs::canonicalize(parent)?, text),
            _ => fs::write(path, format!("{}\n", text.trim_end())),
        }
    }

    fn is_claimed(&self, node: &Path) -> io::Result<bool> {
        let block = node.file_name().unwrap().to_str().unwrap();
        Ok(self.state.lock().unwrap().claimed.contains(block))
    }

    fn nvme_admin(&self, node: &Path, command: AdminCommand, data: &mut [u8]) -> io::Result<u16> {
        assert_eq!(node, self.root.join("dev/nvme0"));
        let mut state = self.state.lock().unwrap();
        let controller = state.nvme.as_mut().ok_or(Errno::ACCESS)?;
        Ok(controller.answer(command, data))
    }
}
