"""One call's stream: results that come in for it, and messages that leave."""
