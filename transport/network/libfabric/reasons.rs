//! Why writes fail, in terms that all networks share.

use super::libfabric_sys::*;
use crate::transport::network::verbs::reason_of_status;
use crate::transport::network::{Failure, Reason};
use std::ffi::c_int;

/// `FI_ETRUNC` and `FI_ENOKEY` of rdma/fi_errno.h.
const TRUNCATED: c_int = 265;
const NO_KEY: c_int = 266;

/// The reason that an error number stands for. Source: fi_errno(3), fi_cq(3), and what the provider tcp reports of
/// connections that end.
fn reason(error: c_int) -> Reason {
    match error {
        FI_ECANCELED => Reason::Flushed,
        libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ETIMEDOUT | libc::ECONNRESET | libc::ECONNREFUSED => {
            Reason::Unreachable
        }
        FI_ECONNABORTED | FI_ENOTCONN | libc::EPIPE | libc::ESHUTDOWN | libc::EHOSTDOWN | libc::ENETDOWN => {
            Reason::Unreachable
        }
        FI_ENORX => Reason::NotReady,
        libc::EACCES | libc::EPERM | libc::EKEYREJECTED | NO_KEY => Reason::RemoteAccess,
        FI_EIO | FI_EINVAL | FI_EMSGSIZE | FI_ENOMEM | libc::EFAULT | TRUNCATED => Reason::Local,
        _ => Reason::Other,
    }
}

/// The failure of a status of EFA's devices. Source: `efa_io_comp_status` of efa_io_defs.h in Linux, and from 4124 on
/// efa_errno.h of libfabric's provider.
pub(super) fn of_efa(status: c_int) -> Failure {
    let reason = match status {
        1 => Reason::Flushed,
        2..=6 | 11 => Reason::Local,
        7 | 12 => Reason::RemoteAccess,
        8 | 9 | 13..=15 | 4124 | 4126 => Reason::Unreachable,
        10 => Reason::NotReady,
        _ => Reason::Other,
    };
    Failure { reason, code: status.unsigned_abs() }
}

/// The failure of a status of a completion over verbs.
pub(super) fn of_verbs(status: c_int) -> Failure {
    let reason = reason_of_status(status.unsigned_abs());
    Failure { reason, code: status.unsigned_abs() }
}

/// The failure of an error number, of either sign.
pub(super) fn failure(error: c_int) -> Failure {
    let error = error.saturating_abs();
    Failure { reason: reason(error), code: error.unsigned_abs() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_of_efa_have_reasons() {
        use Reason::*;
        let all = [
            Other,
            Flushed,
            Local,
            Local,
            Local,
            Local,
            Local,
            RemoteAccess,
            Unreachable,
            Unreachable,
            NotReady,
            Local,
            RemoteAccess,
            Unreachable,
            Unreachable,
            Unreachable,
            Other,
        ];
        for (status, reason) in (0..).zip(all) {
            assert_eq!(of_efa(status), Failure { reason, code: status.unsigned_abs() });
        }
        assert_eq!([4124, 4126, 4105].map(|status| of_efa(status).reason), [Unreachable, Unreachable, Other]);
    }

    #[test]
    fn statuses_of_verbs_have_reasons() {
        use Reason::*;
        let all = [
            Other,
            Local,
            Local,
            Other,
            Local,
            Flushed,
            Other,
            Other,
            Local,
            RemoteAccess,
            RemoteAccess,
            RemoteAccess,
            Unreachable,
            NotReady,
        ];
        for (status, reason) in (0..).zip(all) {
            assert_eq!(of_verbs(status), Failure { reason, code: status.unsigned_abs() });
        }
        assert_eq!([16, 20, 21].map(|status| of_verbs(status).reason), [Unreachable, Unreachable, Other]);
    }

    #[test]
    fn error_numbers_have_reasons() {
        let cases = [
            (-FI_ECANCELED, Reason::Flushed),
            (libc::ECONNRESET, Reason::Unreachable),
            (FI_ENOTCONN, Reason::Unreachable),
            (FI_ENORX, Reason::NotReady),
            (libc::EACCES, Reason::RemoteAccess),
            (NO_KEY, Reason::RemoteAccess),
            (-FI_EINVAL, Reason::Local),
            (TRUNCATED, Reason::Local),
            (4242, Reason::Other),
        ];
        for (error, reason) in cases {
            assert_eq!(failure(error), Failure { reason, code: error.unsigned_abs() });
        }
        assert_eq!(failure(c_int::MIN).code, c_int::MAX.unsigned_abs());
    }
}
