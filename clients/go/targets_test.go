package tandem

import (
	"strings"
	"testing"
)

// Addresses that no server can have are refused when the client is made.
func TestWrongTargetIsRefusedAtOnce(t *testing.T) {
	for _, one := range []string{"", "localhost", "::1", ":50051", "a:", "a:0", "a:http", "a:99999", "http://a:1"} {
		_, err := New([]string{"a:1", one}, NoRetry)
		if err == nil || !strings.Contains(err.Error(), "is no HOST:PORT") {
			t.Errorf("%q: %v", one, err)
		}
	}
	if _, err := New(nil, NoRetry); err == nil {
		t.Error("no target was taken")
	}
}

// Addresses that gRPC can resolve are taken.
func TestRightTargetIsTaken(t *testing.T) {
	for _, one := range []string{"localhost:50051", "[::1]:65535", "unix:/tmp/s", "dns:///box:1"} {
		client, err := New([]string{one}, NoRetry)
		if err != nil {
			t.Fatalf("%q: %v", one, err)
		}
		client.Close()
	}
}
