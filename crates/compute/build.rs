//! Compiles the CUDA kernels for the emulator, which is C++ on the host. Without a C++ compiler the build
//! goes on, and there is no emulator.

fn main() {
    let kernels = "src/cuda/kernels";
    println!("cargo::rerun-if-changed={kernels}");
    println!("cargo::rustc-check-cfg=cfg(emulator)");
    let mut build = cc::Build::new();
    // Kernels round like a card's: multiply-adds may be fused there, but nothing is reordered.
    build.cpp(true).std("c++17").opt_level(2).file(format!("{kernels}/host.cpp")).include(kernels);
    match build.try_compile("ftactor_kernels") {
        Ok(()) => println!("cargo::rustc-cfg=emulator"),
        Err(error) => println!("cargo::warning=no emulated CUDA device: {error}"),
    }
}
