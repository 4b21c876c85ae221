// Command probe is what the cluster's tests run in pods: it serves, asks, and tells what a container can see, one word a
// line on stdout, so that tests need no shell and no image of anybody's.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"
)

func serve(address string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	fmt.Println("serving on", address)
	return http.ListenAndServe(address, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintf(w, "%s %s\n", name, host)
	}))
}

func get(url string) error {
	client := http.Client{Timeout: 5 * time.Second}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	_, err = io.Copy(os.Stdout, answer.Body)
	return err
}

func lookup(name string) error {
	addresses, err := net.LookupHost(name)
	if err != nil {
		return err
	}
	sort.Strings(addresses)
	fmt.Println(strings.Join(addresses, "\n"))
	return nil
}

// dial says whether a TCP connection can be made.
func dial(address string) error {
	connection, err := net.DialTimeout("tcp", address, 5*time.Second)
	if err != nil {
		return err
	}
	return connection.Close()
}

func devices(pattern string) error {
	paths, err := filepath.Glob(pattern)
	if err != nil {
		return err
	}
	for _, path := range paths {
		var status syscall.Stat_t
		if err := syscall.Stat(path, &status); err != nil {
			return err
		}
		if status.Mode&syscall.S_IFMT != syscall.S_IFCHR {
			return fmt.Errorf("%s is not a character device", path)
		}
		minor := status.Rdev&0xff | status.Rdev>>12&0xffffff00
		_, err := syscall.Open(path, syscall.O_RDWR, 0)
		fmt.Printf("%s %d %v\n", path, minor, err)
	}
	return nil
}

func environment(name string) error {
	value, set := os.LookupEnv(name)
	if !set {
		return fmt.Errorf("%s is not set", name)
	}
	fmt.Println(value)
	return nil
}

func main() {
	commands := map[string]func(string) error{
		"serve": serve, "get": get, "lookup": lookup, "dial": dial, "devices": devices, "environment": environment,
	}
	if len(os.Args) != 3 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: probe serve|get|lookup|dial|devices|environment ARGUMENT")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
