//! Why writes fail, in terms that all networks share.

use super::ibverbs_sys::*;
use crate::transport::network::{Failure, Reason};

/// Whether a status says that one operation could not be carried out, whatever becomes of its connection. All others
/// are of the connection, which resumes with the operation: `LOC_QP_OP_ERR` is what soft-RoCE reports of a link that is
/// down.
pub(super) fn is_final(status: ibv_wc_status) -> bool {
    matches!(
        status,
        IBV_WC_LOC_LEN_ERR
            | IBV_WC_LOC_PROT_ERR
            | IBV_WC_LOC_ACCESS_ERR
            | IBV_WC_REM_INV_REQ_ERR
            | IBV_WC_REM_ACCESS_ERR
            | IBV_WC_REM_OP_ERR
    )
}

/// What a completion's status means. Source: ibv_poll_cq(3) and the InfiniBand specification, 11.6.2.
pub(in crate::transport::network) fn reason_of_status(status: ibv_wc_status) -> Reason {
    match status {
        IBV_WC_WR_FLUSH_ERR => Reason::Flushed,
        IBV_WC_RETRY_EXC_ERR | IBV_WC_REM_ABORT_ERR | IBV_WC_RESP_TIMEOUT_ERR => Reason::Unreachable,
        IBV_WC_RNR_RETRY_EXC_ERR => Reason::NotReady,
        IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_OP_ERR => Reason::RemoteAccess,
        IBV_WC_LOC_LEN_ERR | IBV_WC_LOC_QP_OP_ERR | IBV_WC_LOC_PROT_ERR | IBV_WC_LOC_ACCESS_ERR => Reason::Local,
        _ => Reason::Other,
    }
}

/// The failure of a completion's status. Its code has the status in the low 8 bits, the vendor's number above.
pub(super) fn failure(status: ibv_wc_status, vendor: u32) -> Failure {
    Failure { reason: reason_of_status(status), code: (status & 0xff) | vendor << 8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_have_reasons() {
        use Reason::*;
        let cases = [
            (IBV_WC_WR_FLUSH_ERR, Flushed, false),
            (IBV_WC_RETRY_EXC_ERR, Unreachable, false),
            (IBV_WC_RNR_RETRY_EXC_ERR, NotReady, false),
            (IBV_WC_REM_ACCESS_ERR, RemoteAccess, true),
            (IBV_WC_REM_INV_REQ_ERR, RemoteAccess, true),
            (IBV_WC_LOC_PROT_ERR, Local, true),
            (IBV_WC_LOC_QP_OP_ERR, Local, false),
            (IBV_WC_GENERAL_ERR, Other, false),
            (IBV_WC_FATAL_ERR, Other, false),
        ];
        for (status, reason, of_one) in cases {
            assert_eq!(failure(status, 0x89), Failure { reason, code: status | 0x8900 });
            assert_eq!(is_final(status), of_one, "status {status}");
        }
    }
}
