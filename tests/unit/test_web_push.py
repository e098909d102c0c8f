"""Web Push: the encryption of a message, against the example of RFC 8291."""

from cryptography.hazmat.primitives.asymmetric import ec

from opencode_a2a.notices.webpush import decode, encode, encrypt, point

# Section 5 of RFC 8291.
PLAIN = b"When I grow up, I want to be a watermelon"
SERVER_KEY = "yfWPiYE-n46HLnH0KqZOF1fJJU3MYrct3AELtAQ-oRw"
BROWSER_KEY = (
    "BCVxsr7N_eNgVRqvHtD0zTZsEc6-VV-JvLexhqUzORcxaOzi6-AYWXvTBHm4bjyPjs7Vd8pZGH6SRpkNtoIAiw4"
)
SECRET = "BTBZMqHH6r4Tts7J_aSIgg"  # noqa: S105 - an example
SALT = "DGv6ra1nlYgDCS1FRnbzlw"
SEALED = (
    "DGv6ra1nlYgDCS1FRnbzlwAAEABBBP4z9KsN6nGRTbVYI_c7VJSPQTBtkgcy27mlmlMoZIIgDll6e3vCYLocInmYWAmS"
    "6TlzAC8wEqKK6PBru3jl7A_yl95bQpu6cVPTpK4Mqgkf1CXztLVBSt2Ks3oZwbuwXPXLWyouBWLVWGNWQexSgSxsj_Qu"
    "lcy4a-fN"
)


def test_a_message_is_encrypted_as_in_the_example_of_the_standard() -> None:
    number = int.from_bytes(decode(SERVER_KEY), "big")
    key = ec.derive_private_key(number, ec.SECP256R1())

    sealed = encrypt(PLAIN, decode(BROWSER_KEY), decode(SECRET), key=key, salt=decode(SALT))

    assert encode(sealed) == SEALED


def test_no_two_messages_use_the_same_key() -> None:
    browser = point(ec.generate_private_key(ec.SECP256R1()).public_key())

    first, second = (encrypt(PLAIN, browser, b"0" * 16) for _ in range(2))

    assert first[:16] != second[:16]
    assert first[21:86] != second[21:86]
