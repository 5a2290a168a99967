#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| farside_fuzz::run("virtio", input));
