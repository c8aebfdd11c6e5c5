"""A cluster whose connections are encrypted, with dask's security files: certificates that openssl makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import dask
import distributed
import pytest
from distributed.security import Security

import quantkit
from quantkit import cluster
from quantkit.errors import QuantkitError
from tests.cluster.models import contents, write_model


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority (ca.pem), and a certificate of its (cert.pem, key.pem)."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(folder, *new, "-x509", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    openssl(folder, *new, "-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "request.pem")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    openssl(folder, "x509", "-req", "-in", "request.pem", *signed, "-out", "cert.pem")
    return folder


def test_a_cluster_with_tls(files: Path, tmp_path: Path) -> None:
    """Configured as in the how-to. Without certificates, or with files that are none, the error says what to do."""
    ca, cert, key = (str(files / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    of_all = {f"tls_{role}_{kind}": path for role in ("client", "scheduler", "worker")
              for kind, path in (("cert", cert), ("key", key))}  # fmt: skip
    security = Security(tls_ca_file=ca, require_encryption=True, **of_all)
    names = {"CA_FILE": ca, "CLIENT__CERT": cert, "CLIENT__KEY": key}
    variables = {f"DASK_DISTRIBUTED__COMM__TLS__{name}": path for name, path in names.items()}
    model = write_model(tmp_path / "in.gguf", 2)
    quantkit.quantize(model, tmp_path / "one.gguf", "Q8_0")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, protocol="tls://", security=security,
        dashboard_address="127.0.0.1:0",
    ) as local:  # fmt: skip
        address = local.scheduler_address
        words = ["quantize", str(model), str(tmp_path / "out.gguf"), "Q8_0", "--cluster", address]
        said = subprocess.run(
            [sys.executable, "-m", "quantkit", *words], env=os.environ | variables, capture_output=True, text=True
        )
        assert said.returncode == 0, said.stderr
        assert f"cluster {address}: 1 worker(s), 2 thread(s)" in said.stdout
        assert all(worker in said.stdout and worker.startswith("tls://") for worker in local.scheduler.workers)
        assert contents(tmp_path / "out.gguf") == contents(tmp_path / "one.gguf")
        named = "TLS needs certificates: set DASK_DISTRIBUTED__COMM__TLS__CA_FILE, "
        with pytest.raises(QuantkitError, match=named), cluster.connect(address):
            pass
        plain = address.replace("tls://", "tcp://")
        with pytest.raises(QuantkitError, match=f"^{plain}: .*dask scheduler.*") as error, cluster.connect(plain):
            pass
        assert " : " not in str(error.value)
        wrong = {f"distributed.comm.tls.{name}": __file__ for name in ("ca-file", "client.cert", "client.key")}
        with (
            dask.config.set(wrong),
            pytest.raises(QuantkitError, match=f"^{address}: no connection .* the certificates"),
            cluster.connect(address),
        ):
            pass
