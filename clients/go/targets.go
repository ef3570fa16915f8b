package tandem

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// checkTargets refuses what is no HOST:PORT at once: gRPC would dial port 443 of a host without a
// port, and wait. Names of gRPC's resolvers, such as dns:///HOST:PORT and unix:PATH, pass.
func checkTargets(targets []string) error {
	if len(targets) == 0 {
		return fmt.Errorf("tandem: no target")
	}
	for _, one := range targets {
		if strings.HasPrefix(one, "unix:") || strings.HasPrefix(one, "dns:") || strings.Contains(one, ":///") {
			continue
		}
		host, port, err := net.SplitHostPort(one)
		number, invalid := strconv.ParseUint(port, 10, 16)
		if err != nil || host == "" || invalid != nil || number == 0 {
			return fmt.Errorf("tandem: the address %q is no HOST:PORT, such as 127.0.0.1:50051", one)
		}
	}
	return nil
}
