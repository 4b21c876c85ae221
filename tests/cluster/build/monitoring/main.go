// Command scrape-config translates PodMonitors into Prometheus' configuration with the code of the Prometheus operator.
// It reads {"prometheus": Prometheus, "podMonitors": [PodMonitor]} from stdin and writes YAML to stdout.
package main

import (
	"encoding/json"
	"log"
	"os"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus-operator/prometheus-operator/pkg/assets"
	"github.com/prometheus-operator/prometheus-operator/pkg/prometheus"
)

type input struct {
	Prometheus  monitoringv1.Prometheus    `json:"prometheus"`
	PodMonitors []*monitoringv1.PodMonitor `json:"podMonitors"`
}

func run() error {
	var given input
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		return err
	}
	generator, err := prometheus.NewConfigGenerator(nil, &given.Prometheus)
	if err != nil {
		return err
	}
	monitors := map[string]*monitoringv1.PodMonitor{}
	for _, monitor := range given.PodMonitors {
		monitors[monitor.Namespace+"/"+monitor.Name] = monitor
	}
	// The chart's PodMonitors name no Secrets, which the store would hold.
	secrets := assets.NewStoreBuilder(nil, nil)
	config, err := generator.GenerateServerConfiguration(
		&given.Prometheus, nil, monitors, nil, nil, secrets, nil, nil, nil, nil)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(config)
	return err
}

func main() {
	log.SetFlags(0)
	if err := run(); err != nil {
		log.Fatal(err)
	}
}
