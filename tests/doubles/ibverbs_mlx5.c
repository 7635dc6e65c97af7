/* The libibverbs double: libmlx5, a shared object of its own. As the driver's library does, it finds its work behind
 * the context. -DMLX5_BEFORE_54 leaves data direct out, as before rdma-core 54. */
#include "ibverbs.h"

#include <infiniband/mlx5dv.h>
#include <string.h>

EXPORT bool mlx5dv_is_supported(struct ibv_device *device) { return !strncmp(device->name, "mlx5", 4); }

#ifndef MLX5_BEFORE_54
/* Headers before rdma-core 54 declare neither. */
EXPORT struct ibv_mr *mlx5dv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                           int access, int mlx5_access);
EXPORT int mlx5dv_get_data_direct_sysfs_path(struct ibv_context *context, char *buffer, size_t bytes);

/* rdma-core, providers/mlx5/verbs.c: EOPNOTSUPP for a context of another driver. */
static const struct mlx5_calls *calls_of(struct ibv_context *verbs) {
    const struct context *context = (struct context *)verbs;
    return context->magic == IBVERBS_MAGIC ? context->mlx5 : NULL;
}

struct ibv_mr *mlx5dv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                    int access, int mlx5_access) {
    const struct mlx5_calls *calls = calls_of(pd->context);
    if (!calls) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return calls->reg_dmabuf_mr(pd, offset, length, iova, fd, access, mlx5_access);
}

int mlx5dv_get_data_direct_sysfs_path(struct ibv_context *context, char *buffer, size_t bytes) {
    const struct mlx5_calls *calls = calls_of(context);
    return calls ? calls->get_data_direct_sysfs_path(context, buffer, bytes) : EOPNOTSUPP;
}
#endif
