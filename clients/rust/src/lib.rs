#![doc = include_str!("../README.md")]
#![warn(missing_docs)]
mod error;
mod generated;
mod retry;
mod stream;
pub use error::{Error, Result};
pub use generated::{common, common::v1::ErrorReason, common::v1::FinishReason, inference};
use inference::v1::{inference_service_client::InferenceServiceClient as Stub, *};
pub use retry::RetryPolicy;
use std::{sync::Arc, time::Duration};
use tokio::{sync::mpsc, time::Instant, time::sleep, time::timeout_at};
use tokio_stream::wrappers::ReceiverStream;
pub use tokio_stream::{self, Stream, StreamExt};
pub use tonic::{self, Code};
use tonic::{Request, Status, Streaming, transport::Channel, transport::Endpoint};

/// Return the endpoint of a server at `HOST:PORT`, or `https://HOST:PORT` to use its `tls_config`.
pub fn endpoint(target: &str) -> Result<Endpoint> {
    let uri = if target.contains("://") { target.into() } else { format!("http://{target}") };
    let no_address = |_| Status::invalid_argument(format!("{target} is no address"));
    let [connect, ping, answer] = [5, 30, 10].map(Duration::from_secs);
    let endpoint = Endpoint::from_shared(uri).map_err(no_address)?.connect_timeout(connect);
    Ok(endpoint.http2_keep_alive_interval(ping).keep_alive_timeout(answer))
}

/// Client of one or several servers; its clones share connections. Calls need a Tokio runtime.
#[derive(Clone)]
pub struct Client {
    /// Asked before each attempt for the token to send as `authorization: Bearer TOKEN`.
    pub token: Option<Arc<dyn Fn() -> String + Send + Sync>>,
    /// How calls recover from failures by themselves.
    pub retry: RetryPolicy,
    deadline: Option<Instant>,
    failures: retry::Failures,
    stub: Stub<Channel>,
}

/// Defines calls that are repeated; what is `$whole` and broke off, as long as streams are resumed.
macro_rules! unary {
    ($($(#[$doc:meta])* $see:vis $name:ident = $rpc:ident($of:ty) -> $to:ty, $whole:expr;)*) => {$(
        $(#[$doc])*
        $see async fn $name(&self, request: $of) -> Result<$to> {
            let mut failures = self.failures.clone();
            let attempts = async {
                loop {
                    let error = match self.stub.clone().$rpc(self.request(request.clone())?).await {
                        Ok(answer) => return Ok(answer.into_inner()),
                        Err(status) => Error::from(status),
                    };
                    let had_it = error.is_broken() && !error.is_unsent()
                        || error.reason() == ErrorReason::HandedOver;
                    let has_broken = $whole && self.retry.resume && had_it;
                    sleep(failures.wait(&self.retry, error, has_broken)?).await;
                }
            };
            self.until_deadline(attempts).await
        }
    )*};
}

impl Client {
    /// Make a client of servers, see [`endpoint`], at least one; calls take turns among those alive.
    pub fn new(endpoints: impl IntoIterator<Item = Endpoint>) -> Self {
        let endpoints: Vec<_> = endpoints.into_iter().collect();
        assert!(!endpoints.is_empty(), "a client needs at least one server");
        let spare_turns = 16 * endpoints.len().saturating_sub(1); // turns are drawn by chance
        let failures = retry::Failures { spare_turns, ..Default::default() };
        let channel = Channel::balance_list(endpoints.into_iter());
        let stub = Stub::new(channel).max_decoding_message_size(64 << 20);
        Self { token: None, retry: RetryPolicy::DEFAULT, deadline: None, failures, stub }
    }
    /// Return a client for calls that fail with `DeadlineExceeded` after this time from now.
    pub fn with_deadline(&self, limit: Duration) -> Self {
        Self { deadline: Instant::now().checked_add(limit), ..self.clone() }
    }
    /// Stream the events of a request, over breaks; an error is the last. Dropping it cancels.
    pub fn generate(&self, request: GenerateRequest) -> ReceiverStream<Result<GenerateResponse>> {
        let (client, request) = (self.clone(), retry::with_key(request, &self.retry));
        let (sender, events) = mpsc::channel(1);
        tokio::spawn(async move {
            let call = client.until_deadline(stream::generate(&client, request, &sender));
            let ended = tokio::select! { ended = call => ended, () = sender.closed() => Ok(()) };
            if let Err(error) = ended {
                let _ = sender.send(Err(error)).await;
            }
        });
        ReceiverStream::new(events)
    }
    /// Run the requests that `messages` add and cancel, in one attempt, and return at their first
    /// event. The end of `messages` half-closes; [`Error::from_item`] reads the error of an item.
    pub async fn generate_batch(
        &self, messages: impl Stream<Item = GenerateBatchRequest> + Send + 'static,
    ) -> Result<Streaming<GenerateBatchResponse>> {
        let (mut stub, request) = (self.stub.clone(), self.request(messages)?);
        self.until_deadline(async { Ok(stub.generate_batch(request).await?.into_inner()) }).await
    }
    /// Return the whole outcome of a request.
    pub async fn complete(&self, request: GenerateRequest) -> Result<CompleteResponse> {
        let request = Some(retry::with_key(request, &self.retry));
        let whole = self.complete_whole(CompleteRequest { request }).await;
        whole.map_err(|error| error.within("request."))
    }
    unary! {
        complete_whole = complete(CompleteRequest) -> CompleteResponse, true;
        /// End a live request by its id; its stream gets `finished` (CANCELLED) and `done`.
        pub abort = abort(AbortRequest) -> AbortResponse, false;
        /// Return the ids that a prompt has.
        pub tokenize = tokenize(TokenizeRequest) -> TokenizeResponse, false;
        /// Return the text of ids.
        pub detokenize = detokenize(DetokenizeRequest) -> DetokenizeResponse, false;
        /// Return a model with its limits.
        pub get_model = get_model(GetModelRequest) -> GetModelResponse, false;
        /// Return a page of the models that are served.
        pub list_models = list_models(ListModelsRequest) -> ListModelsResponse, false;
    }
    fn request<M>(&self, message: M) -> Result<Request<M>> {
        let mut request = Request::new(message);
        if let Some(end) = self.deadline {
            request.set_timeout(end.saturating_duration_since(Instant::now()));
        }
        if let Some(token) = &self.token {
            let value = format!("Bearer {}", token()).parse();
            let value = value.map_err(|_| Status::invalid_argument("the token is not ASCII"))?;
            request.metadata_mut().insert("authorization", value);
        }
        Ok(request)
    }
    async fn until_deadline<A>(&self, work: impl Future<Output = Result<A>>) -> Result<A> {
        let Some(end) = self.deadline else { return work.await };
        let ended = timeout_at(end, work).await.ok();
        let in_time = ended.filter(|ended| ended.is_ok() || Instant::now() < end);
        in_time.unwrap_or_else(|| Err(Status::deadline_exceeded("the deadline passed").into()))
    }
}
