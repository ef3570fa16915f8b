//! Commands, and the clients that they ask for.

use std::{fs, sync::Arc, time::Duration};

use serde::Deserialize;
use serde_json::Value;
use tandem_client::tonic::transport::{Certificate, ClientTlsConfig, Identity};
use tandem_client::tonic::{self, Status};
use tandem_client::{Client, Error, RetryPolicy, endpoint};

/// Shortest silence in milliseconds after which the server lets a client test its connection;
/// tonic does what it is told.
const LEAST_KEEPALIVE_MS: u64 = 5_500;

/// One line of the input.
#[derive(Deserialize, Default)]
#[serde(default)]
pub struct Command {
    pub id: String,
    #[serde(rename = "do")]
    pub what: String,
    targets: Vec<String>,
    ca: Option<String>,
    cert: Option<String>,
    key: Option<String>,
    server_name: Option<String>,
    token: Option<String>,
    pub connection: Option<String>,
    retry: Option<String>,
    keepalive_ms: Option<u64>,
    pub request: Value,
    pub items: Vec<Value>,
    pub cancel_items: Vec<u64>,
    pub deadline_ms: Option<u64>,
    pub cancel_after_deltas: Option<usize>,
    pub pause_ms: u64,
    pub tell: bool,
    pub command: Option<String>,
}

impl Command {
    pub fn policy(&self) -> RetryPolicy {
        let soon = Duration::from_millis(1);
        match self.retry.as_deref() {
            Some("none") => RetryPolicy::NO_RETRY,
            Some("soon") => RetryPolicy {
                max_attempts: 9,
                initial_delay: soon,
                max_delay: soon,
                ..RetryPolicy::DEFAULT
            },
            _ => RetryPolicy::DEFAULT,
        }
    }

    pub fn connect(&self) -> Result<Client, Error> {
        let tls = self.tls().map_err(|error| Status::invalid_argument(error.to_string()))?;
        let mut endpoints = Vec::new();
        for target in &self.targets {
            let mut one = match &tls {
                None => endpoint(target)?,
                Some(tls) => endpoint(&format!("https://{target}"))?
                    .tls_config(tls.clone())
                    .map_err(unusable)?,
            };
            if let Some(silence) = self.keepalive_ms {
                let silence = Duration::from_millis(silence.max(LEAST_KEEPALIVE_MS));
                one = one.http2_keep_alive_interval(silence).keep_alive_timeout(silence);
            }
            endpoints.push(one);
        }
        let mut client = Client::new(endpoints);
        if let Some(token) = self.token.clone() {
            client.token = Some(Arc::new(move || token.clone()));
        }
        Ok(client)
    }

    fn tls(&self) -> std::io::Result<Option<ClientTlsConfig>> {
        let mut tls = None;
        if let Some(ca) = &self.ca {
            let ca = Certificate::from_pem(fs::read(ca)?);
            tls = Some(ClientTlsConfig::new().ca_certificate(ca));
        }
        if let (Some(cert), Some(key)) = (&self.cert, &self.key) {
            let identity = Identity::from_pem(fs::read(cert)?, fs::read(key)?);
            tls = Some(tls.unwrap_or_default().identity(identity));
        }
        if let Some(name) = &self.server_name {
            tls = tls.map(|tls| tls.domain_name(name));
        }
        Ok(tls)
    }
}

fn unusable(error: tonic::transport::Error) -> Status {
    Status::invalid_argument(format!("the certificates cannot be used: {error}"))
}
