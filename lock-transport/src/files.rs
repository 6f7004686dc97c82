use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

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
        let pin = match params.text("pin")? {
            Some(text) => Some(text.parse().map_err(|Malformed| {
                params.wrong(
                    "has a wrong pin; give sha256: and the fingerprint that `openssl x509 -fingerprint -sha256` prints",
                )
            })?),
            None => None,
        };
        Ok(Self { ca, cert, key, pin })
    }
}

/// The SHA-256 fingerprint of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin(pub [u8; 32]);

/// The text is not a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a pin is sha256: and 64 hexadecimal digits")
    }
}

impl std::error::Error for Malformed {}

/// `sha256:` and 64 hexadecimal digits, between which there may be colons, as OpenSSL prints them.
impl FromStr for Pin {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let digits = text.strip_prefix("sha256:").ok_or(Malformed)?.replace(':', "");
        if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(Malformed);
        }
        let mut pin = [0; 32];
        for (byte, at) in pin.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16).map_err(|_| Malformed)?;
        }
        Ok(Self(pin))
    }
}
