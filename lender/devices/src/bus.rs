//! A device model's interface to the bus: DMA and interrupts.

use farside_fabric::{Access, Fault, Iova, memory::HostSlice};

/// The function's bus interface for the duration of one call.
pub struct Bus<'a> {
    /// Memory accesses by the function as bus master.
    pub dma: &'a mut dyn Dma,
    /// Interrupts that the function raises.
    pub irq: &'a mut dyn Interrupts,
}

/// DMA by IOVA. Each access is translated and may fault; the implementation counts and
/// logs faults.
pub trait Dma {
    /// Bus-master enable. While it is clear, all DMA faults.
    fn is_bus_master(&self) -> bool;

    /// Translates the longest prefix of `[iova, iova + len)` that is contiguous in host
    /// memory: 1 to `len` bytes. The slice is valid until the device is next quiesced.
    fn translate(&mut self, iova: Iova, len: usize, access: Access) -> Result<HostSlice, Fault>;

    /// Whether all of `[iova, iova + len)` can be translated. What cannot is no fault: nothing is accessed.
    fn reaches(&mut self, iova: Iova, len: usize, access: Access) -> bool;

    /// Copies `buf.len()` bytes from `iova`. On a fault, the bytes before it have been
    /// copied.
    fn read(&mut self, iova: Iova, buf: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < buf.len() {
            let at = iova.wrapping_add(done as u64);
            let slice = self.translate(at, buf.len() - done, Access::Read)?;
            slice.read(&mut buf[done..done + slice.len()]);
            done += slice.len();
        }
        Ok(())
    }

    /// Copies `buf` to `iova`. On a fault, the bytes before it have been copied.
    fn write(&mut self, iova: Iova, buf: &[u8]) -> Result<(), Fault> {
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
    /// On a fault `out` is unchanged.
    fn gather(
        &mut self,
        iova: Iova,
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

/// Interrupts of a function. The device makes both calls; the interrupt mode that the
/// guest has enabled determines which of them has an effect.
pub trait Interrupts {
    /// Sends the message of `vector` (MSI or MSI-X). Masked vectors stay
    /// pending. No effect while both MSI and MSI-X are disabled.
    fn raise(&mut self, vector: u16);

    /// Sets the level of the INTx line. No effect while MSI or MSI-X is
    /// enabled, or INTx is disabled in the command register; the level is
    /// stored.
    fn set_intx(&mut self, asserted: bool);

    /// The vector's bit in the MSI-X pending bit array: whether a mask holds back its
    /// message.
    fn is_pending(&self, vector: u16) -> bool;

    /// Whether [`Interrupts::set_intx`] drives the line now: neither MSI nor MSI-X is
    /// enabled. A device whose line depends on memory that the guest writes monitors
    /// that memory only then. Returning true is always correct, but may cause additional
    /// traps.
    fn intx_in_use(&self) -> bool {
        true
    }
}
