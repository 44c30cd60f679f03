#!/usr/bin/env python3
"""Who the replicas are, for Envoy: deploy/cluster/clusters.yaml with addresses in place of its names, on standard output."""
import argparse
import pathlib
import re
import sys

TEMPLATE = pathlib.Path(__file__).resolve().parents[2] / "deploy/cluster/clusters.yaml"
ENDPOINT = re.compile(r"\{endpoint: \{address: \{socket_address: \{address: (carrel-\w+), port_value: \d+\}\}\}\}")


def address(text):
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[A-Za-z0-9.\-]+|\[[0-9a-fA-F:]+\]", host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f'"{text}" is not HOST:PORT')
    return host.strip("[]"), int(port)


def clusters(serve=None, api=None, template=None):
    """The file's text. serve, api: lists of (host, port); None: as the template has them."""
    given = {"carrel-serve": serve, "carrel-api": api}

    def endpoints(match):
        if given[match[1]] is None:
            return match[0]
        return ", ".join(f'{{endpoint: {{address: {{socket_address: {{address: "{host}", port_value: {port}}}}}}}}}'
                         for host, port in given[match[1]])

    text, count = ENDPOINT.subn(endpoints, template or TEMPLATE.read_text())
    if count != len(given):
        raise ValueError(f"{TEMPLATE} has {count} endpoints, not {len(given)}")
    return text


def main():
    parser = argparse.ArgumentParser(prog="tools/cluster/clusters.py", description=__doc__, epilog="A list that is not given stays as the file has it.")
    parser.add_argument("--serve", action="append", type=address, metavar="HOST:PORT", help="a replica of `carrel serve`; may be repeated")
    parser.add_argument("--api", action="append", type=address, metavar="HOST:PORT", help="a replica of `carrel api`; may be repeated")
    args = parser.parse_args()
    sys.stdout.write(clusters(args.serve, args.api))


if __name__ == "__main__":
    main()
