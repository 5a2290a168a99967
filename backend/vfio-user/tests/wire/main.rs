//! Wire-level tests of the server side, one file for each command. After every refusal
//! the next message must be answered correctly: the stream is still framed.

#[path = "../support/device.rs"]
mod device;
mod harness;

mod descriptors;
mod device_get_info;
mod device_get_irq_info;
mod device_get_region_info;
mod device_reset;
mod device_set_irqs;
mod dma_commands;
mod dma_map;
mod dma_unmap;
mod flow;
mod framing;
mod listener;
mod not_served;
mod region_read;
mod region_write;
mod region_write_multi;
mod version;
