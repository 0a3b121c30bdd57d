/* Stands for pyxis in a test cluster: takes those of its flags that job scripts use, as Slurm's own parser hands them over, and tells
 * each task what it was given. It starts no container. */
#include <slurm/spank.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis, 1);

enum { IMAGE, MOUNTS, WORKDIR, NO_HOME, FLAGS };
static const char *const told[FLAGS] = {"GIVEN_IMAGE", "GIVEN_MOUNTS", "GIVEN_WORKDIR", "GIVEN_NO_HOME"};
static char *given[FLAGS];

static int take(int flag, const char *value, int remote)
{
	(void)remote;
	given[flag] = strdup(value != NULL && *value ? value : "yes");
	return given[flag] == NULL ? ESPANK_ERROR : ESPANK_SUCCESS;
}

static struct spank_option flags[] = {
	{"container-image", "IMAGE", "image", 1, IMAGE, take},
	{"container-mounts", "MOUNTS", "mounts", 1, MOUNTS, take},
	{"container-workdir", "PATH", "working folder", 1, WORKDIR, take},
	{"no-container-mount-home", NULL, "no home", 0, NO_HOME, take},
	SPANK_OPTIONS_TABLE_END,
};

int slurm_spank_init(spank_t job, int count, char **words)
{
	(void)count, (void)words;
	if (spank_context() == S_CTX_SLURMD)
		return ESPANK_SUCCESS;
	for (int i = 0; i < FLAGS; i++)
		if (spank_option_register(job, &flags[i]) != ESPANK_SUCCESS)
			return ESPANK_ERROR;
	return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t job, int count, char **words)
{
	(void)count, (void)words;
	for (int i = 0; i < FLAGS; i++)
		if (given[i] != NULL)
			spank_setenv(job, told[i], given[i], 1);
	return given[WORKDIR] != NULL && chdir(given[WORKDIR]) != 0 ? ESPANK_ERROR : ESPANK_SUCCESS;
}
