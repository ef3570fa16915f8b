// @generated
/// Types of the package `tandem.common`.
pub mod common {
    /// Version 1.
    #[allow(missing_docs, clippy::all, rustdoc::all)]
    pub mod v1 {
        include!("gen/tandem.common.v1.rs");
    }
}
/// Types of the package `tandem.inference`: requests, events, and the bare stub.
pub mod inference {
    /// Version 1.
    #[allow(missing_docs, clippy::all, rustdoc::all)]
    pub mod v1 {
        include!("gen/tandem.inference.v1.rs");
    }
}
