use std::path::PathBuf;

use lock_core::LockError;

use crate::url::Params;

/// The PEM files of a TLS connection, read at each connect, and the pinned certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Trusted certificates: of authorities, or of a server that signed its own. If not set, those that the system trusts.
    pub ca: Option<PathBuf>,
    /// The certificate that the client shows if the server asks for one, followed by intermediate certificates.
    pub cert: Option<PathBuf>,
    /// The private key of [`cert`](Self::cert), not encrypted.
    pub key: Option<PathBuf>,
    /// The only certificate that the server may show. Without [`ca`](Self::ca) it is trusted whatever its authority, name and dates are.
    pub pin: Option<Pin>,
}

impl TlsFiles {
    /// Reads the parameters `ca`, `cert`, `key` and `pin` of an address.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if one is repeated or wrong, or if only one of `cert` and `key` is given.
    pub fn from_params(params: &mut Params) -> Result<Self, LockError> {
        let mut file = |name| Ok::<_, LockError>(params.text(name)?.map(PathBuf::from));
        let (ca, cert, key) = (file("ca")?, file("cert")?, file("key")?);
        if cert.is_some() != key.is_some() {
            return Err(params.wrong("gives only one of cert and key; a certificate needs its private key"));
        }
        let pin = params
            .text("pin")?
            .map(|text| Pin::parse(&text).ok_or_else(|| params.wrong(Pin::WRONG)));
        let pin = pin.transpose()?;
        Ok(Self { ca, cert, key, pin })
    }
}

/// The SHA-256 fingerprint of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin(pub [u8; 32]);

impl Pin {
    /// Reads `sha256:` and 64 hexadecimal digits, between which there may be colons, as OpenSSL prints them. `None` if it is none of these.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("sha256:")?.replace(':', "");
        if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        let mut pin = [0; 32];
        for (byte, at) in pin.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
        }
        Some(Self(pin))
    }

    /// What a wrong `pin` is told.
    pub const WRONG: &str =
        "has a wrong pin; give sha256: and the fingerprint that `openssl x509 -fingerprint -sha256` prints";
}
