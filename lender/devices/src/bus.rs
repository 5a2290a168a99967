//! What a device model sees of the world beyond its own registers.

use farside_fabric::{Access, Fault, memory::HostSlice};

/// The bus side of a function for the length of one call.
pub struct Bus<'a> {
    /// Memory accesses that the function masters.
    pub dma: &'a mut dyn Dma,
    /// Interrupts that the function raises.
    pub irq: &'a mut dyn Interrupts,
}

/// DMA by IOVA. Each access is translated and may be refused; a refusal has
/// already been counted and logged when it is returned.
pub trait Dma {
    /// Whether the function may master the bus (bus-master enable). All DMA is
    /// refused while it may not.
    fn is_bus_master(&self) -> bool;

    /// Translates the longest run of `[iova, iova + len)` that starts at
    /// `iova` and is contiguous in host memory: 1 to `len` bytes. The slice is
    /// good until the device next reports itself quiesced.
    fn translate(&mut self, iova: u64, len: usize, access: Access) -> Result<HostSlice, Fault>;

    /// Copies `buf.len()` bytes from `iova`. On a fault, what came before it
    /// has been copied.
    fn read(&mut self, iova: u64, buf: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < buf.len() {
            let at = iova.wrapping_add(done as u64);
            let slice = self.translate(at, buf.len() - done, Access::Read)?;
            slice.read(&mut buf[done..done + slice.len()]);
            done += slice.len();
        }
        Ok(())
    }

    /// Copies `buf` to `iova`. On a fault, what came before it has been
    /// copied.
    fn write(&mut self, iova: u64, buf: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < buf.len() {
            let at = iova.wrapping_add(done as u64);
            let slice = self.translate(at, buf.len() - done, Access::Write)?;
            slice.write(&buf[done..done + slice.len()]);
            done += slice.len();
        }
        Ok(())
    }

    /// Appends to `out` the host slices behind `[iova, iova + len)`, in order.
    /// On a fault `out` is as it was before.
    fn gather(
        &mut self,
        iova: u64,
        len: usize,
        access: Access,
        out: &mut Vec<HostSlice>,
    ) -> Result<(), Fault> {
        let before = out.len();
        let mut done = 0;
        while done < len {
            match self.translate(iova.wrapping_add(done as u64), len - done, access) {
                Ok(slice) => {
                    done += slice.len();
                    out.push(slice);
                }
                Err(fault) => {
                    out.truncate(before);
                    return Err(fault);
                }
            }
        }
        Ok(())
    }
}

/// Interrupts of a function. Which of the two calls has an effect follows from
/// what the guest has enabled; the device makes both and need not know.
pub trait Interrupts {
    /// Sends the message of `vector` (MSI or MSI-X). Masked vectors stay
    /// pending. No effect while neither is enabled.
    fn raise(&mut self, vector: u16);

    /// Sets the level of the INTx line. No effect while MSI or MSI-X is
    /// enabled, or INTx is disabled in the command register; the level is
    /// remembered.
    fn set_intx(&mut self, asserted: bool);

    /// Whether the message of `vector` is held back by a mask: the vector's
    /// bit in the MSI-X pending bit array.
    fn is_pending(&self, vector: u16) -> bool;

    /// Whether [`Interrupts::set_intx`] drives the line now: neither MSI nor
    /// MSI-X is enabled. A device whose line depends on memory that the guest
    /// writes watches that memory only then. True is always safe, and costs
    /// the guest a trap now and then.
    fn intx_in_use(&self) -> bool {
        true
    }
}
