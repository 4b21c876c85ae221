// Command pause holds the namespaces of a pod, and is the first process of every node of the test cluster: it reaps the
// orphans that end up with it and leaves on SIGINT or SIGTERM.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func reap() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if pid <= 0 {
			return
		}
	}
}

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	// Children that died before Notify sent no signal that anyone saw.
	reap()
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		reap()
	}
}
