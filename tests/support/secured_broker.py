"""A broker with listeners for SCRAM over TLS, OAUTHBEARER tokens and client certificates; the plain one is its administrator's.

One more listener advertises a name that does not resolve.
"""

import base64
import json
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from penstock.infra.broker import access, embedded, settings
from penstock.pipeline.runtime.roles import AclRule
from tests.support.bare_clients import python_client

MECHANISM = "SCRAM-SHA-512"
REAUTH_MS = 3000
"""A connection with a token ends after this time unless its client authenticates again."""
_TYPES = {"topic": ResourceType.TOPIC, "group": ResourceType.GROUP, "transactional-id": ResourceType.TRANSACTIONAL_ID}


class SecuredBroker:
    """A broker in a state directory of its own, whose secured listeners are at `host`; `close` stops it."""

    def __init__(self, home: Path, *, host: str = settings.HOST) -> None:
        self.home, self.certificate = home, home / "cert.pem"
        self._make_certificate(host)
        stock = settings.server_properties
        self.secure, self.oauth, self.mutual, self.astray = (f"{host}:{port}" for port in _free_ports(4))
        settings.server_properties = lambda **given: self._secured(stock(**given))
        try:
            self.plain = embedded.start(home=home).bootstrap
        finally:
            settings.server_properties = stock

    def add_user(self, name: str, password: str) -> None:
        """Make a SCRAM user, who may do nothing yet."""
        with self._admin() as admin:
            admin.alter_user_scram_credentials(
                [UserScramCredentialUpsertion(name, ScramMechanism.SCRAM_SHA_512, password, iterations=4096)]
            )

    def allow(self, user: str, rules: Iterable[AclRule]) -> None:
        """Allow a user what these rules say."""
        acls = [
            ACL(
                principal=f"User:{user}",
                host="*",
                operation=ACLOperation[rule.operation],
                permission_type=ACLPermissionType.ALLOW,
                resource_pattern=ResourcePattern(_TYPES[rule.resource], rule.name, ACLResourcePatternType[rule.pattern.upper()]),
            )
            for rule in rules
        ]
        with self._admin() as admin:
            admin.create_acls(acls)

    def credentials(self, user: str, password: str) -> Mapping[str, Any]:
        """What a SCRAM user connects with."""
        return {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": MECHANISM,
            "sasl_plain_username": user,
            "sasl_plain_password": password,
            "ssl_cafile": str(self.certificate),
        }

    def certify(self, user: str) -> Mapping[str, Any]:
        """What a user with a new certificate of the broker's authority connects with."""
        key, certificate = self.home / f"{user}.key", self.home / f"{user}.crt"
        made = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={user}", "-keyout", str(key)]
        request = subprocess.run(made, check=True, capture_output=True).stdout
        signed = ["openssl", "x509", "-req", "-days", "2", "-CA", str(self.certificate), "-CAkey", str(self.home / "key.pem")]
        subprocess.run([*signed, "-CAcreateserial", "-out", str(certificate)], input=request, check=True, capture_output=True)
        files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
        return {"security_protocol": "SSL", "ssl_cafile": str(self.certificate), **files}

    def close(self) -> None:
        """Stop it."""
        embedded.stop(self.home)

    @contextmanager
    def _admin(self) -> Any:
        admin = KafkaAdminClient(**python_client(self.plain))
        try:
            yield admin
        finally:
            admin.close()

    def _secured(self, text: str) -> str:
        lines = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        more = f"SECURE://{self.secure},OAUTH://{self.oauth},MUTUAL://{self.mutual}"
        lines["listeners"] += f",{more},ASTRAY://{self.astray}"
        lines["advertised.listeners"] += f",{more},ASTRAY://broker-0.kafka.invalid:9092"
        lines["listener.security.protocol.map"] += ",SECURE:SASL_SSL,OAUTH:SASL_PLAINTEXT,MUTUAL:SSL,ASTRAY:PLAINTEXT"
        module = "org.apache.kafka.common.security"
        lines |= {
            "listener.name.secure.sasl.enabled.mechanisms": MECHANISM,
            "listener.name.secure.scram-sha-512.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
            "listener.name.secure.ssl.keystore.type": "PEM",
            "listener.name.secure.ssl.keystore.location": str(self.home / "both.pem"),
            "listener.name.mutual.ssl.keystore.type": "PEM",
            "listener.name.mutual.ssl.keystore.location": str(self.home / "both.pem"),
            "listener.name.mutual.ssl.truststore.type": "PEM",
            "listener.name.mutual.ssl.truststore.location": str(self.certificate),
            "listener.name.mutual.ssl.client.auth": "required",
            "listener.name.oauth.oauthbearer.connections.max.reauth.ms": str(REAUTH_MS),
            "listener.name.oauth.sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.oauth.oauthbearer.sasl.jaas.config": (
                f'{module}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{access.USER};User:{settings.OWN_USER}",
        }
        return "".join(f"{name}={value}\n" for name, value in lines.items())

    def _make_certificate(self, host: str) -> None:
        key, command = self.home / "key.pem", "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        names = ["-addext", f"subjectAltName=IP:{host}", "-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run([*command.split(), *names], check=True, capture_output=True)
        (self.home / "both.pem").write_text(key.read_text() + self.certificate.read_text())


def unsecured_token(user: str) -> str:
    """A JSON web token without a signature, as a broker without a validator of its own takes it."""
    now = time.time()
    parts = [{"alg": "none"}, {"sub": user, "iat": now - 5, "exp": now + 600}]
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts) + "."


def _free_ports(count: int) -> list[int]:
    with_ports = [socket.create_server((settings.HOST, 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in with_ports]
    for server in with_ports:
        server.close()
    return ports
