//! The error of all calls.
use crate::ErrorReason;
use prost::Message;
use std::{collections::HashMap, error, fmt, iter, ops::Deref, sync::Arc, time::Duration};
use tonic::{Code, ConnectError, Status};
use tonic_types::{ErrorDetail, ErrorDetails, ErrorInfo, StatusExt, pb};

const CUT_OFF: &str = "protocol error: missing grpc-status";
/// Result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Failure of a call: the gRPC status to which it derefs, and what Tandem tells in its details. A
/// connection that broke, or could not be made, is `Unavailable` without a reason.
// The second field is the beginning of a field's path, which leads to the caller's request.
#[derive(Clone, Debug)]
pub struct Error(Status, &'static str);

impl Error {
    /// Return the reason; `Unspecified` where nothing told one that this client knows.
    pub fn reason(&self) -> ErrorReason {
        let name = self.info().map(|info| format!("ERROR_REASON_{}", info.reason));
        name.and_then(|name| ErrorReason::from_str_name(&name)).unwrap_or_default()
    }
    /// Return the name of the reason as it was told, and more facts as its metadata.
    pub fn info(&self) -> Option<ErrorInfo> {
        self.get_error_details_vec().into_iter().find_map(|detail| match detail {
            ErrorDetail::ErrorInfo(info) if info.domain == "tandem" => Some(info),
            _ => None, // a proxy may add an ErrorInfo of its own
        })
    }
    /// Return the path of the field that is wrong, such as `sampling.top_p`.
    pub fn field(&self) -> Option<String> {
        let path = self.get_details_bad_request()?.field_violations.into_iter().next()?.field;
        Some(path.strip_prefix(self.1).unwrap_or(&path).into())
    }
    /// Return the wait after which the server advised to try again.
    pub fn retry_after(&self) -> Option<Duration> {
        Some(self.get_details_retry_info()?.retry_delay.unwrap_or_default())
    }
    /// Return the id under which the server's log knows the request.
    pub fn request_id(&self) -> Option<String> {
        Some(self.get_details_request_info()?.request_id)
    }
    /// Read the `error` of an item of a batch.
    pub fn from_item(error: &[u8]) -> Self {
        let status = pb::Status::decode(error).unwrap_or_default();
        let details = error.to_vec().into();
        Self(Status::with_details(status.code.into(), status.message, details), "")
    }
    /// Make the error of what this client found itself.
    pub(crate) fn found(code: Code, reason: &str, message: &str) -> Self {
        let details = ErrorDetails::with_error_info(reason, "tandem", HashMap::new());
        Self(Status::with_error_details(code, message, details), "")
    }
    /// Leave `outer`, which leads to the caller's request, out of the path of the field.
    pub(crate) fn within(self, outer: &'static str) -> Self {
        Self(self.0, outer)
    }
    /// Return true if no connection could be made, so that no server has the call.
    pub(crate) fn is_unsent(&self) -> bool {
        causes(self).any(|cause| cause.is::<ConnectError>())
    }
    /// Return true if no server told what failed: its connection broke, or there was none.
    pub(crate) fn is_broken(&self) -> bool {
        self.code() == Code::Unavailable && self.info().is_none()
    }
}

impl From<Status> for Error {
    /// Take a status; one that no server sent is `Unavailable`. For connections that break tonic
    /// has Unknown, Internal and Cancelled, with a cause as its source or with the text CUT_OFF.
    fn from(status: Status) -> Self {
        let text = match causes(&status).last() {
            Some(root) => format!("the connection failed: {root}"),
            None if status.message().starts_with(CUT_OFF) => "the stream was cut off".into(),
            None => return Self(status, ""),
        };
        let mut told = Status::unavailable(text);
        told.set_source(Arc::new(status));
        Self(told, "")
    }
}

/// Return what caused a status on this side, the root last; nothing for one that a server sent.
fn causes(status: &Status) -> impl Iterator<Item = &(dyn error::Error + 'static)> {
    iter::successors(error::Error::source(status), |cause| cause.source())
}

impl Deref for Error {
    type Target = Status;
    fn deref(&self) -> &Status {
        &self.0
    }
}
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}: {}", self.code(), self.reason(), self.message())
    }
}
impl error::Error for Error {}
