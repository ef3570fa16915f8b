//! Decisions on retries, without I/O.
use crate::{Error, Result, inference::v1::GenerateRequest};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

/// How calls recover from failures by themselves.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    /// Most attempts of a call that no server has accepted, the first included.
    pub max_attempts: u32,
    /// Wait where the server advises none; it doubles with each failure in a row.
    pub initial_delay: Duration,
    /// Longest wait, whatever the server advises.
    pub max_delay: Duration,
    /// Whether a stream that breaks goes on at any server of the same model.
    pub resume: bool,
    /// Longest time for which a broken stream may be without a server.
    pub resume_within: Duration,
}

impl RetryPolicy {
    /// Up to 5 attempts, after 0.2 to 10 s; streams that break are resumed within 120 s.
    pub const DEFAULT: Self = Self {
        max_attempts: 5,
        initial_delay: Duration::from_millis(200),
        max_delay: Duration::from_secs(10),
        resume: true,
        resume_within: Duration::from_secs(120),
    };
    /// Every failure is told at once.
    pub const NO_RETRY: Self = Self { max_attempts: 1, resume: false, ..Self::DEFAULT };
}

#[derive(Clone, Default)]
pub(crate) struct Failures {
    /// Turns of dead servers that cost nothing, as another server may live.
    pub spare_turns: usize,
    pub in_a_row: u32,
    pub breaks_in_vain: u32,
    pub broken_since: Option<Instant>,
}

impl Failures {
    /// Return the wait before the next attempt, or the final error; what `broke` is tried longer.
    pub fn wait(&mut self, policy: &RetryPolicy, error: Error, broke: bool) -> Result<Duration> {
        if error.is_unsent() && self.spare_turns > 0 {
            self.spare_turns -= 1;
            return Ok(Duration::ZERO);
        }
        let doubled = policy.initial_delay.saturating_mul(1 << self.in_a_row.min(16));
        let advised = error.retry_after().unwrap_or(doubled).min(policy.max_delay);
        let jittered = advised.mul_f64(1.0 + 0.25 * random() as f64 / u64::MAX as f64);
        self.in_a_row += 1;
        let (mut longest, mut is_final) = (policy.max_delay, self.in_a_row >= policy.max_attempts);
        if broke || self.broken_since.is_some() {
            self.breaks_in_vain += u32::from(self.broken_since.is_none());
            let broken_for = self.broken_since.get_or_insert_with(Instant::now).elapsed();
            is_final = broken_for > policy.resume_within || !policy.resume;
            is_final |= self.breaks_in_vain > 16; // the request itself may be what stops servers
            longest = longest.min(Duration::from_secs(2));
        }
        let is_transient = error.retry_after().is_some() || error.is_broken();
        if is_final || !is_transient { Err(error) } else { Ok(jittered.min(longest)) }
    }
}

/// Give a request that may be sent twice the key by which the later one ends the earlier.
pub(crate) fn with_key(mut request: GenerateRequest, policy: &RetryPolicy) -> GenerateRequest {
    if policy.max_attempts > 1 || policy.resume {
        request.attempt_key.get_or_insert_with(|| format!("{:016x}{:016x}", random(), random()));
    }
    request
}
fn random() -> u64 {
    RandomState::new().build_hasher().finish() // the keys of hash maps are random
}
