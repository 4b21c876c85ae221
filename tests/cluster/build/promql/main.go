// Command promql is Prometheus without its server, for tests of boards and rules: one JSON document on stdin holds
// scrapes, queries and a rules file; the one on stdout what Prometheus makes of them.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/util/annotations"
)

type scrape struct {
	At          float64           `json:"at"`
	Labels      map[string]string `json:"labels"`
	ContentType string            `json:"content_type"`
	Text        string            `json:"text"`
	HonorLabels bool              `json:"honor_labels"`
}

type request struct {
	Scrapes []scrape `json:"scrapes"`
	Queries []struct {
		Expression string  `json:"expression"`
		At         float64 `json:"at"`
	} `json:"queries"`
	Rules string `json:"rules"`
}

type sample struct {
	Labels map[string]string `json:"labels"`
	Value  string            `json:"value"`
}

type result struct {
	Error   string   `json:"error,omitempty"`
	Metrics []string `json:"metrics"`
	Samples []sample `json:"samples"`
}

type answer struct {
	Results      []result `json:"results"`
	LintProblems []string `json:"lint_problems"`
	RuleErrors   []string `json:"rule_errors"`
}

// memory holds whole series, by their labels.
type memory map[string]*promql.Series

// targets holds the series of each target's last scrape. As Prometheus does, a series that its next scrape lacks is marked as ended.
type targets map[string]map[string]bool

func (t targets) add(s scrape, m memory) error {
	found, err := m.add(s)
	if err != nil {
		return err
	}
	target := labels.FromMap(s.Labels).String()
	for of := range t[target] {
		if !found[of] {
			m[of].Floats = append(m[of].Floats, promql.FPoint{T: s.at(), F: math.Float64frombits(value.StaleNaN)})
		}
	}
	t[target] = found
	return nil
}

func (s scrape) at() int64 { return int64(math.Round(s.At * 1000)) }

func (m memory) add(s scrape) (map[string]bool, error) {
	found := map[string]bool{}
	at := s.at()
	p, err := textparse.New([]byte(s.Text), s.ContentType, nil, textparse.ParserOptions{})
	if err != nil {
		return nil, err
	}
	for {
		entry, err := p.Next()
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, err
		}
		if entry != textparse.EntrySeries {
			continue
		}
		var of labels.Labels
		p.Labels(&of)
		_, _, sampled := p.Series()
		b := labels.NewBuilder(of)
		for name, target := range s.Labels {
			own := of.Get(name)
			if own != "" && s.HonorLabels {
				continue
			}
			if own != "" {
				b.Set(model.ExportedLabelPrefix+name, own)
			}
			b.Set(name, target)
		}
		of = b.Labels()
		known, ok := m[of.String()]
		if !ok {
			known = &promql.Series{Metric: of}
			m[of.String()] = known
		}
		if last := len(known.Floats) - 1; last >= 0 && known.Floats[last].T >= at {
			return nil, fmt.Errorf("%s is there twice, or came too late", of)
		}
		found[of.String()] = true
		known.Floats = append(known.Floats, promql.FPoint{T: at, F: sampled})
	}
}

func (m memory) Querier(_, _ int64) (storage.Querier, error) { return m, nil }
func (m memory) Close() error                                { return nil }

func (m memory) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	found := &set{at: -1}
	for _, series := range m {
		all := true
		for _, matcher := range matchers {
			all = all && matcher.Matches(series.Metric.Get(matcher.Name))
		}
		if all {
			found.series = append(found.series, *series)
		}
	}
	slices.SortFunc(found.series, func(a, b promql.Series) int { return labels.Compare(a.Metric, b.Metric) })
	return found
}

func (m memory) LabelValues(_ context.Context, name string, _ *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, errors.New("label values are not asked for by queries")
}

func (m memory) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, errors.New("label names are not asked for by queries")
}

type set struct {
	series []promql.Series
	at     int
}

func (s *set) Next() bool                        { s.at++; return s.at < len(s.series) }
func (s *set) At() storage.Series                { return promql.NewStorageSeries(s.series[s.at]) }
func (s *set) Err() error                        { return nil }
func (s *set) Warnings() annotations.Annotations { return nil }

// named lists the metrics that an expression selects.
func named(expression parser.Expr) []string {
	names := []string{}
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		if selector, ok := node.(*parser.VectorSelector); ok {
			for _, matcher := range selector.LabelMatchers {
				if matcher.Name == model.MetricNameLabel {
					names = append(names, matcher.Value)
				}
			}
		}
		return nil
	})
	slices.Sort(names)
	return slices.Compact(names)
}

func evaluate(engine *promql.Engine, p parser.Parser, store memory, expression string, at float64) (result, error) {
	made := result{Metrics: []string{}, Samples: []sample{}}
	parsed, err := p.ParseExpr(expression)
	if err != nil {
		return made, err
	}
	made.Metrics = named(parsed)
	query, err := engine.NewInstantQuery(context.Background(), store, nil, expression, time.UnixMilli(int64(math.Round(at*1000))))
	if err != nil {
		return made, err
	}
	defer query.Close()
	done := query.Exec(context.Background())
	if done.Err != nil {
		return made, done.Err
	}
	if len(done.Warnings) > 0 {
		warnings, infos := done.Warnings.AsStrings(expression, 0, 0)
		return made, errors.New(strings.Join(append(warnings, infos...), "; "))
	}
	switch value := done.Value.(type) {
	case promql.Vector:
		for _, one := range value {
			made.Samples = append(made.Samples, sample{one.Metric.Map(), number(one.F)})
		}
	case promql.Scalar:
		made.Samples = append(made.Samples, sample{map[string]string{}, number(value.V)})
	default:
		return made, fmt.Errorf("a query of a panel gives a vector or a number, this one %s", value.Type())
	}
	return made, nil
}

func number(value float64) string { return fmt.Sprintf("%g", value) }

func run(in io.Reader, out io.Writer) error {
	var asked request
	if err := json.NewDecoder(in).Decode(&asked); err != nil {
		return err
	}
	told := answer{Results: []result{}, LintProblems: []string{}, RuleErrors: []string{}}
	store, known := memory{}, targets{}
	for _, s := range asked.Scrapes {
		if err := known.add(s, store); err != nil {
			return fmt.Errorf("scrape of %v: %w", s.Labels, err)
		}
		problems, err := promlint.New(bytes.NewBufferString(s.Text)).Lint()
		if err != nil {
			return fmt.Errorf("scrape of %v: %w", s.Labels, err)
		}
		for _, problem := range problems {
			told.LintProblems = append(told.LintProblems, problem.Metric+": "+problem.Text)
		}
	}
	slices.Sort(told.LintProblems)
	told.LintProblems = slices.Compact(told.LintProblems)
	p := parser.NewParser(parser.Options{})
	engine := promql.NewEngine(promql.EngineOpts{
		MaxSamples: 1_000_000, Timeout: time.Minute, LookbackDelta: 5 * time.Minute, EnableAtModifier: true, Parser: p,
	})
	for _, query := range asked.Queries {
		made, err := evaluate(engine, p, store, query.Expression, query.At)
		if err != nil {
			made.Error = err.Error()
		}
		told.Results = append(told.Results, made)
	}
	_, problems := rulefmt.Parse([]byte(asked.Rules), false, model.UTF8Validation, p, slog.New(slog.DiscardHandler))
	for _, problem := range problems {
		told.RuleErrors = append(told.RuleErrors, problem.Error())
	}
	return json.NewEncoder(out).Encode(told)
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
