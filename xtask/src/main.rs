//! Developer chores: demo, test, bench.
fn main() {}
