//! Measures the cost of a translation, with cache hits and misses.

use std::{hint::black_box, time::Instant};

use farside_fabric::{
    Access, Iova, LenderPath, MemoryRange, NtbLimits, Owner, PeerAddress, memory::create_sealed,
    soft::Adapter,
};

const RUNS: u64 = 20_000_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let adapter = Adapter::new(NtbLimits::default())?;
    let mut path = adapter.attach("example", &Owner::new("vm", "user 1"))?;
    let page = MemoryRange::whole(create_sealed("ram", 4096)?, 4096);
    // More pages than the cache has entries, each a separate mapping.
    for n in 0..64 {
        path.map_peer(PeerAddress::new(n * 4096), page.clone())?;
    }
    path.open_window(Iova::new(0), PeerAddress::new(0), 64 * 4096)?;
    path.set_bus_master(true)?;

    let mut measure = |what: &str, pages: u64| -> Result<(), Box<dyn std::error::Error>> {
        let start = Instant::now();
        for n in 0..RUNS {
            let iova = Iova::new(n % pages * 4096);
            black_box(path.translate(black_box(iova), 512, Access::Write)?);
        }
        let each = start.elapsed().as_secs_f64() * 1e9 / RUNS as f64;
        println!("{what:30} {each:5.1} ns");
        Ok(())
    };
    measure("hit, same entry as before", 1)?;
    measure("hit, another of 8 entries", 8)?;
    measure("miss", 64)
}
