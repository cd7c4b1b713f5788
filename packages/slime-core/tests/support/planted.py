"""Made-up secrets in the forms that services document, and where they stand. None was ever valid."""

import random
import string

WORD = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def made_up(seed, length, letters=WORD):
    """Random characters, the same for the same seed."""
    return "".join(random.Random(seed).choices(letters, k=length))


def planted():
    """By name, a text and the secret in it: forty forms."""
    parts = [made_up(seed, 40) for seed in range(40)]
    hexes = [made_up(seed, 64, HEX) for seed in range(40)]
    upper = made_up(99, 16, string.ascii_uppercase + string.digits)
    known = {
        "Hugging Face": f"hf_{parts[0][:34]}",
        "OpenAI": f"sk-proj-{parts[1]}",
        "Anthropic": f"sk-ant-api03-{parts[2]}",
        "xAI": f"xai-{parts[3]}",
        "Groq": f"gsk_{parts[4]}",
        "NVIDIA": f"nvapi-{parts[5]}",
        "Replicate": f"r8_{parts[6][:37]}",
        "LangSmith": f"lsv2_pt_{hexes[7][:32]}",
        "GitHub": f"ghp_{parts[8][:36]}",
        "GitHub, fine-grained": f"github_pat_{parts[9]}",
        "GitLab": f"glpat-{parts[10][:20]}",
        "Slack": f"xoxb-{parts[11]}",
        "Slack app": f"xapp-1-{parts[12]}",
        "AWS": f"AKIA{upper}",
        "Google": f"AIza{parts[14][:35]}",
        "Google OAuth": f"ya29.{parts[15]}",
        "npm": f"npm_{parts[16][:36]}",
        "PyPI": f"pypi-{parts[17]}",
        "Docker": f"dckr_pat_{parts[18][:27]}",
        "SendGrid": f"SG.{parts[19][:22]}.{parts[20]}abc",
        "Mailgun": f"key-{hexes[20][:32]}",
        "Mailchimp": f"{hexes[21][:32]}-us12",
        "Stripe": f"sk_live_{parts[22][:24]}",
        "Square": f"sq0atp-{parts[23][:22]}",
        "Twilio": f"SK{hexes[24][:32]}",
        "Discord": f"M{parts[25][:23]}.{parts[26][:6]}.{parts[27][:38]}",
        "Telegram": f"110201543:{parts[27][:35]}",
        "DigitalOcean": f"dop_v1_{hexes[28]}",
        "Databricks": f"dapi{hexes[29][:32]}",
        "Tailscale": f"tskey-auth-{parts[30][:20]}",
        "Grafana": f"glsa_{parts[31][:32]}_{hexes[31][:8]}",
        "Atlassian": f"ATATT3x{parts[32]}",
        "JSON web token": f"eyJ{parts[33][:20]}.{parts[34]}.{parts[35]}",
    }  # fmt: skip
    pem = "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----"
    within = {
        "private key": (pem, parts[36]),
        "user and password": ("http://{}@h:8000/score", f"me:{parts[37][:12]}"),
        "key in an address": ("http://h:8000/score?a=1&key={}&b=2", parts[38][:20]),
        "signature in an address": ("https://h/file?X-Amz-Signature={}", hexes[39]),
        "bearer": ("Authorization: Bearer {}", parts[39][:24]),
        "basic": ('{{"authorization": "Basic {}"}}', parts[13]),
        "by its name": ("MY_SERVICE_KEY={}", parts[21][:18]),
    }
    texts = {name: (secret, secret) for name, secret in known.items()}
    return texts | {name: (form.format(secret), secret) for name, (form, secret) in within.items()}
