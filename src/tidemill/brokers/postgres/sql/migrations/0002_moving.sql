-- That all of this store goes to another, and how far others have been taken in.

CREATE TABLE tidemill.departure (
    mark     text    NOT NULL,
    moves_to text    NOT NULL,
    sealed   boolean NOT NULL
);

CREATE TABLE tidemill.arrival (
    mark   text   PRIMARY KEY,
    cursor text   NOT NULL,
    first  bigint NOT NULL               -- where its numbers begin here
);
