// Command hyper is every Kubernetes program of the test cluster in one file, chosen by the name it is called by: linking
// the shared packages once makes 136 MB of what would be 480 MB, and the running programs share their pages.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// kubectl reports its own errors, in its own format, so it does not go through cli.Run.
func runKubectl() int {
	logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
	return 0
}

func run(command *cobra.Command) func() int {
	return func() int { return cli.Run(command) }
}

func main() {
	programs := map[string]func() func() int{
		"kube-apiserver":          func() func() int { return run(apiserver.NewAPIServerCommand()) },
		"kube-controller-manager": func() func() int { return run(controllermanager.NewControllerManagerCommand()) },
		"kube-scheduler":          func() func() int { return run(scheduler.NewSchedulerCommand()) },
		"kubelet":                 func() func() int { return run(kubelet.NewKubeletCommand(context.Background())) },
		"kube-proxy":              func() func() int { return run(proxy.NewProxyCommand()) },
		"kubectl":                 func() func() int { return runKubectl },
	}
	program, known := programs[filepath.Base(os.Args[0])]
	if !known {
		fmt.Fprintf(os.Stderr, "no program of that name: %s\n", os.Args[0])
		os.Exit(2)
	}
	os.Exit(program()())
}
