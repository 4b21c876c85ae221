// Command probe runs in pods of the cluster tests. It serves HTTP, sends requests and prints what a container sees, one
// value per line, so that tests need no shell and no foreign image.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
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

// dial fails if no TCP connection can be opened.
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
		"serve": serve, "get": get, "dial": dial, "devices": devices, "environment": environment,
	}
	if len(os.Args) != 3 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: probe serve|get|dial|devices|environment ARGUMENT")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
