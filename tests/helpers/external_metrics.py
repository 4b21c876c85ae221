"""A metrics adapter: answers HorizontalPodAutoscalers from Prometheus, by one rule in the form of prometheus-adapter's.

It runs in a pod (`cluster.monitoring`), as the API server's extension `external.metrics.k8s.io`, with nothing but the
standard library. The API server is its only caller, so it authorizes nobody.
"""

from __future__ import annotations

import json
import re
import ssl
import sys
import urllib.parse
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GROUP_VERSION = "external.metrics.k8s.io/v1beta1"
TIMEOUT_SECONDS = 30


def series_of(rule: Mapping[str, Any]) -> str:
    """Raises ValueError: the rule does not name one series, or not the label with the namespace."""
    found = re.fullmatch(r'\{__name__="([a-zA-Z0-9_:]+)"\}', rule["seriesQuery"])
    if found is None or rule["resources"] != {"overrides": {"namespace": {"resource": "namespace"}}}:
        raise ValueError(f"the rule must name one series and its namespace: {rule}")
    return found[1]


def promql(rule: Mapping[str, Any], namespace: str, selector: str) -> str:
    """The query for the series in a namespace. selector: `label=value`, separated by commas.

    Raises:
        ValueError: the selector has another form.
    """
    matchers = [f"namespace={json.dumps(namespace)}"]
    for requirement in filter(None, selector.split(",")):
        label, is_equal, value = requirement.partition("=")
        if not is_equal or not re.fullmatch(r"[a-zA-Z_]\w*", label):
            raise ValueError(f"labelSelector: {requirement!r} is not label=value")
        matchers.append(f"{label}={json.dumps(value.removeprefix('='))}")
    query: str = rule["metricsQuery"]
    return query.replace("<<.Series>>", series_of(rule)).replace("<<.LabelMatchers>>", ",".join(matchers))


def value_list(metric: str, samples: list[Any]) -> dict[str, Any]:
    """An ExternalMetricValueList of the samples of an instant query."""
    items = [
        {
            "metricName": metric,
            "metricLabels": sample["metric"],
            "timestamp": datetime.fromtimestamp(float(sample["value"][0]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "value": f"{round(1000 * float(sample['value'][1]))}m",
        }
        for sample in samples
    ]
    return {"kind": "ExternalMetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": items}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rule: Mapping[str, Any]
    prometheus: str

    def do_GET(self) -> None:
        asked = urllib.parse.urlsplit(self.path)
        metric = series_of(self.rule)
        about = re.fullmatch(f"/apis/{GROUP_VERSION}/namespaces/([^/]+)/([^/]+)", urllib.parse.unquote(asked.path))
        if asked.path == f"/apis/{GROUP_VERSION}":
            served = {"name": metric, "singularName": "", "namespaced": True, "verbs": ["get"]}
            resources = [{**served, "kind": "ExternalMetricValueList"}]
            body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION}
            self.answer(200, {**body, "resources": resources})
        elif about is None or about[2] != metric:
            self.answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404})
        else:
            selector = dict(urllib.parse.parse_qsl(asked.query)).get("labelSelector", "")
            try:
                self.answer(200, value_list(metric, self.samples(promql(self.rule, about[1], selector))))
            except (ValueError, OSError) as error:
                status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": str(error)}
                self.answer(500, {**status, "code": 500})

    def samples(self, query: str) -> list[Any]:
        url = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return list(json.load(answer)["data"]["result"])

    def answer(self, code: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main(prometheus: str, rule: str, certificate: str, key: str) -> None:
    Handler.prometheus, Handler.rule = prometheus, json.loads(rule)
    server = ThreadingHTTPServer(("", 6443), Handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    # A client that does not finish its handshake holds only its own thread.
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
