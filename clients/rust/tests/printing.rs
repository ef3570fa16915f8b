//! What people see of messages that they print.
use tandem_client::inference::v1::TokenLogprobs;

/// Bytes of tokens are printed as text, with escapes for what is no character by itself.
#[test]
fn token_bytes_are_printed_as_text() {
    let top_token_bytes = vec!["caf\u{e9}".into(), vec![0xc3].into()];
    let told = TokenLogprobs { token_bytes: "\tif".into(), top_token_bytes, ..Default::default() };
    let printed = format!("{told:?}");
    assert!(printed.contains(r#"token_bytes: b"\tif""#), "{printed}");
    assert!(printed.contains(r#"top_token_bytes: [b"caf\xc3\xa9", b"\xc3"]"#), "{printed}");
}
