//! Compiles the contract to descriptors, by which messages are read from JSON and written to it.

use std::{env, error::Error, fs, path::Path};

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    let protos = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../../../protos");
    println!("cargo::rerun-if-changed={}", protos.join("tandem").display());
    let descriptors = protox::compile(["tandem/inference/v1/inference_service.proto"], [&protos])?;
    let file = Path::new(&env::var("OUT_DIR")?).join("descriptors.binpb");
    Ok(fs::write(file, descriptors.encode_to_vec())?)
}
