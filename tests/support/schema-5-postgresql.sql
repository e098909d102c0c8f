-- The first schema that PostgreSQL had.
CREATE TABLE tasks (
	no BIGSERIAL NOT NULL, 
	id VARCHAR COLLATE "C" NOT NULL, 
	principal VARCHAR COLLATE "C" NOT NULL, 
	context_id VARCHAR COLLATE "C" NOT NULL, 
	state VARCHAR COLLATE "C" NOT NULL, 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	output_modes BYTEA, 
	status BYTEA NOT NULL, 
	request BYTEA, 
	archive BYTEA, 
	PRIMARY KEY (no), 
	UNIQUE (id)
);
CREATE INDEX tasks_by_state ON tasks (principal, state, updated_at, no);
CREATE INDEX tasks_ended ON tasks (updated_at, state);
CREATE INDEX tasks_by_context ON tasks (principal, context_id, updated_at, no);
CREATE INDEX tasks_by_time ON tasks (principal, updated_at, no);
CREATE TABLE tallies (
	principal VARCHAR COLLATE "C" NOT NULL, 
	state VARCHAR COLLATE "C" NOT NULL, 
	n INTEGER NOT NULL, 
	PRIMARY KEY (principal, state)
);
CREATE TABLE messages (
	principal VARCHAR COLLATE "C" NOT NULL, 
	message_id VARCHAR COLLATE "C" NOT NULL, 
	task_no BIGINT NOT NULL, 
	digest BYTEA NOT NULL, 
	PRIMARY KEY (principal, message_id, digest)
);
CREATE INDEX messages_by_task ON messages (task_no);
CREATE TABLE entries (
	no BIGSERIAL NOT NULL, 
	task_no BIGINT NOT NULL, 
	first_seq INTEGER NOT NULL, 
	last_seq INTEGER NOT NULL, 
	data BYTEA NOT NULL, 
	PRIMARY KEY (no)
);
CREATE UNIQUE INDEX entries_by_task ON entries (task_no, first_seq);
CREATE TABLE links (
	principal VARCHAR COLLATE "C" NOT NULL, 
	context_id VARCHAR COLLATE "C" NOT NULL, 
	place VARCHAR COLLATE "C" NOT NULL, 
	session_id VARCHAR COLLATE "C" NOT NULL, 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (principal, context_id, place)
);
CREATE TABLE owners (
	session_id VARCHAR COLLATE "C" NOT NULL, 
	principal VARCHAR COLLATE "C" NOT NULL, 
	claimed_until BIGINT, 
	PRIMARY KEY (session_id)
);
CREATE TABLE interrupts (
	request_id VARCHAR COLLATE "C" NOT NULL, 
	task_id VARCHAR COLLATE "C" NOT NULL, 
	context_id VARCHAR COLLATE "C" NOT NULL, 
	principal VARCHAR COLLATE "C" NOT NULL, 
	type VARCHAR COLLATE "C" NOT NULL, 
	asked BYTEA NOT NULL, 
	expires_at BIGINT NOT NULL, 
	resolution VARCHAR COLLATE "C", 
	settled_at BIGINT, 
	settled_by VARCHAR COLLATE "C", 
	answer BYTEA, 
	PRIMARY KEY (request_id)
);
CREATE INDEX interrupts_pending ON interrupts (principal, resolution, expires_at);
CREATE TABLE places (
	name VARCHAR COLLATE "C" NOT NULL, 
	principal VARCHAR COLLATE "C" NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE replicas (
	no BIGSERIAL NOT NULL, 
	name VARCHAR COLLATE "C" NOT NULL, 
	version VARCHAR COLLATE "C" NOT NULL, 
	started TIMESTAMP WITH TIME ZONE NOT NULL, 
	seen TIMESTAMP WITH TIME ZONE NOT NULL, 
	commits BIGINT NOT NULL, 
	gone TIMESTAMP WITH TIME ZONE, 
	PRIMARY KEY (no)
)
 WITH (fillfactor = 50);
CREATE TABLE schema_version (
	version INTEGER NOT NULL, 
	oldest INTEGER NOT NULL, 
	checked INTEGER DEFAULT '0' NOT NULL
);
INSERT INTO schema_version (version, oldest) VALUES (5, 5);
