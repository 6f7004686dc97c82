//! Does nothing. That there is a build script makes cargo fetch its dependencies, and one of these brings `protoc`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
