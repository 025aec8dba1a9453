"""A real S3-compatible server (moto's) on the loopback, in a process of its own: deltalake's writer holds the GIL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SERVER = """
import logging, sys
import boto3
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
address = "http://{}:{}".format(*server.get_host_and_port())
keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket="bucket")
print(address, flush=True)
sys.stdin.read()
"""


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Storage options of a server that holds an empty bucket, ``bucket``."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address, "moto's server did not start"
        yield {
            "aws_endpoint_url": address,
            "aws_allow_http": "true",
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "aws_region": "us-east-1",
        }
        server.kill()
