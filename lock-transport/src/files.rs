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
        let pin = params.text("pin")?;
        let pin = pin.map(|text| Pin::parse(&text).ok_or_else(|| params.wrong(Pin::WRONG)));
        Ok(Self {
            ca,
            cert,
            key,
            pin: pin.transpose()?,
        })
    }
}

/// The SHA-256 fingerprint of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin(pub [u8; 32]);

impl Pin {
    /// What errors say of a wrong `pin`.
    pub const WRONG: &str =
        "has a wrong pin; give sha256: and the fingerprint that `openssl x509 -fingerprint -sha256` prints";

    /// Reads `sha256:` and 64 hexadecimal digits, between which there may be colons, as OpenSSL prints them. `None` if it is none of these.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("sha256:")?.replace(':', "");
        let digits: Option<Vec<_>> = digits.chars().map(|digit| digit.to_digit(16)).collect();
        let digits = digits.filter(|digits| digits.len() == 64)?;
        let bytes = digits.chunks(2).map(|pair| u8::try_from(16 * pair[0] + pair[1]));
        let bytes: Vec<_> = bytes.collect::<Result<_, _>>().ok()?;
        bytes.try_into().ok().map(Self)
    }
}
