//! Signatures of requests to S3, version 4, as its servers check them: written after Amazon's description ("Authenticating
//! requests (AWS Signature Version 4)"), and independent of the client's code.

use std::collections::BTreeMap;
use std::fmt::Write;

use ring::digest::{SHA256, digest};
use ring::hmac::{HMAC_SHA256, Key, sign};

/// The head of a request: method, path, query, and headers by their names in lower case.
#[derive(Debug, Default)]
pub(crate) struct Head {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: BTreeMap<String, String>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn part<'a>(fields: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = fields.split(',').filter_map(|field| field.trim().split_once('='));
    fields.find_map(|(own, value)| (own == name).then_some(value))
}

impl Head {
    /// Returns whether the request is signed with these keys.
    pub(crate) fn is_signed(&self, key: &str, secret: &str) -> bool {
        self.check(key, secret).unwrap_or(false)
    }

    fn check(&self, key: &str, secret: &str) -> Option<bool> {
        let fields = self.headers.get("authorization")?.strip_prefix("AWS4-HMAC-SHA256 ")?;
        let (own, scope) = part(fields, "Credential")?.split_once('/')?;
        let names = part(fields, "SignedHeaders")?;
        let [date, region, service, end] = scope.split('/').collect::<Vec<_>>()[..] else { return None };
        let time = self.headers.get("x-amz-date")?;
        let needed = ["host", "x-amz-content-sha256", "x-amz-date"];
        if (own, service, end) != (key, "s3", "aws4_request")
            || !time.starts_with(date)
            || !needed.iter().all(|name| names.split(';').any(|own| own == *name))
        {
            return None;
        }
        let mut query: Vec<&str> = self.query.split('&').filter(|pair| !pair.is_empty()).collect();
        query.sort_unstable();
        let mut headers = String::new();
        for name in names.split(';') {
            let _ = writeln!(headers, "{name}:{}", self.headers.get(name)?.trim());
        }
        let body = self.headers.get("x-amz-content-sha256")?;
        let request =
            format!("{}\n{}\n{}\n{headers}\n{names}\n{body}", self.method, self.path, query.join("&"));
        let hash = hex(digest(&SHA256, request.as_bytes()).as_ref());
        let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{hash}");
        let mac = |key: &[u8], text: &str| sign(&Key::new(HMAC_SHA256, key), text.as_bytes());
        let mut derived = mac(format!("AWS4{secret}").as_bytes(), date);
        for word in [region, service, end] {
            derived = mac(derived.as_ref(), word);
        }
        Some(hex(mac(derived.as_ref(), &text).as_ref()) == part(fields, "Signature")?)
    }
}

/// Amazon's own example of a GET of a range, with the keys of its documentation.
#[test]
fn the_documented_example_is_signed() {
    let headers = [
        ("host", "examplebucket.s3.amazonaws.com"),
        ("range", "bytes=0-9"),
        ("x-amz-content-sha256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        ("x-amz-date", "20130524T000000Z"),
        (
            "authorization",
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,\
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,\
             Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
    ];
    let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let head = Head { method: "GET".to_owned(), path: "/test.txt".to_owned(), query: String::new(), headers };
    let secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
    assert!(head.is_signed("AKIAIOSFODNN7EXAMPLE", secret));
    assert!(!head.is_signed("AKIAIOSFODNN7EXAMPLE", "another"));
    assert!(!head.is_signed("another", secret));
}
